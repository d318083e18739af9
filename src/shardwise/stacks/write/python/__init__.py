"""Write a run as a training script that needs torch and nothing else.

The script is plain `fully_shard` or DDP code with its settings at the top, and contains only what
the run needs. Its losses equal those of `shardwise train` bit by bit.
"""

from __future__ import annotations

from shardwise.spec.lookup import ModuleRef
from shardwise.spec.run import RunSpec, check_loss
from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference
from shardwise.stacks.write.axes import as_run
from shardwise.stacks.write.exported import USUAL, Exported, Target
from shardwise.stacks.write.python import foreign, model
from shardwise.stacks.write.python.axes import axes_pieces
from shardwise.stacks.write.python.data import data_pieces, data_settings, knows_vocabulary
from shardwise.stacks.write.python.loop import loop_pieces
from shardwise.stacks.write.python.loss import chunked_pieces
from shardwise.stacks.write.python.parallel import parallel_pieces
from shardwise.stacks.write.python.piece import Piece, assemble
from shardwise.stacks.write.python.settings import plain_name, settings_piece, train_of
from shardwise.stacks.write.python.step import step_pieces
from shardwise.stacks.write.python.unsupported import unsupported_by_script
from shardwise.stacks.write.torchrun import script_command

NAME = "train.py"


def export(run: RunSpec, target: Target = USUAL) -> Exported:
    """The script of a run whose strategy is resolved."""
    check_loss(run)
    given, run = run, run._replace(strategy=applied(run))
    written = model.can_be_written(run)
    constants = model.model_settings(run) if written else foreign.foreign_settings(run)
    pieces = [
        settings_piece(run, constants, data_settings(run)),
        *chunked_pieces(run, written),
        *axes_pieces(run, written),
        *(model.model_pieces(run) if written else foreign.foreign_pieces(run)),
        *([] if knows_vocabulary(run) else [Piece(foreign.VOCABULARY, ("torch:nn",))]),
        *parallel_pieces(run, written),
        *data_pieces(run),
        *step_pieces(run, written),
        *loop_pieces(run, written),
    ]
    command = script_command(run, target.name(NAME))
    text = assemble(_description(run, written, command), pieces)
    differences = tuple(map(Difference, unsupported_by_script(given, written)))
    return Exported(NAME, text, differences, command, run.strategy)


def applied(run: RunSpec) -> Strategy:
    """The strategy as the script runs it: embedding and head stay in the root's unit."""
    return as_run(run.strategy.but(split_root=False), "python")


def _description(run: RunSpec, written: bool, command: str) -> str:
    strategy = run.strategy
    how = {"single": "on one device", "ddp": "with DistributedDataParallel"}
    ways = how.get(strategy.kind, f"with fully_shard ({strategy})")
    needs = "torch >= 2.13"
    if not written and not isinstance(run.model, ModuleRef):
        needs += " and transformers"
    if train_of(run).checkpoint.save and strategy.kind != "single":
        needs += "; torch itself needs NumPy to save"
    origin = "Written by `shardwise export`; it trains as `shardwise train` does."
    return f"Train {plain_name(run)} {ways}.\n\n    {command}\n\nNeeds {needs}.\n{origin}"
