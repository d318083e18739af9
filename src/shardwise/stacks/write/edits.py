"""What to edit in a user's own file, so that its stack runs a run: the fewest keys that do it.

Both the user's file and the exported one are read. First all keys of the exported file replace the
user's, and keys that it lacks are left out. Then each of these edits is taken back if the file
means the same without it. A file that already means the run needs no edit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from shardwise.spec.adapter import Adapter
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.stacks.outcomes import ABSENT
from shardwise.stacks.read import known_keys
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.imports import (
    import_file,
    imported_strategy,
    read_script,
    read_table,
)
from shardwise.stacks.write.adapter_differences import unused_settings
from shardwise.stacks.write.differences import without_effect
from shardwise.stacks.write.edit import Edit, Path
from shardwise.stacks.write.exported import Exported
from shardwise.stacks.write.script_edits import model_edits

Table = Mapping[str, object]
# Most keys of both files that are compared; real ones have fewer than a hundred.
_MOST_KEYS = 400
# Arguments of a script's TrainingArguments or SFTConfig.
_ARGUMENTS = (*known_keys.TRAINER, "max_length", "packing", "packing_strategy")


def edits_of(run: RunSpec, exported: Exported, stack: str, path: FilePath) -> list[Edit]:
    """The fewest edits after which the user's file at `path` runs what was exported.

    Raises:
        SpecError: The file is not one of the stack.
    """
    from shardwise.stacks.read.stack_files import STACK_FILES

    file = STACK_FILES.get(stack)
    if file is None or exported.name.endswith(".py"):
        known = ", ".join(name for name in STACK_FILES if " " not in name)
        raise SpecError(f"against: edits are listed for a YAML or JSON of {known}")
    mine, script = read_table(path), read_script(path)
    if not (file.fits(mine) or script or (stack == "trl" and STACK_FILES["trainer"].fits(mine))):
        raise SpecError(f"against: {path} is no configuration of {stack}; give the stack it is for")
    theirs = yaml_table(exported.text)
    loaded: dict[str, object] = {}
    if script:
        # The model, its dtype and its adapters are in other calls of the script.
        loaded = {"dtype": theirs["dtype"]} if "dtype" in theirs else {}
        theirs = {key: value for key, value in theirs.items() if key in _ARGUMENTS or key in mine}
    changes = edits(mine, theirs, lambda table: _meaning(file.read({**loaded, **table}), run))
    return [*model_edits(import_file(path), script, run), *changes] if script else changes


class Meaning(NamedTuple):
    """What a file settles of a run, and the keys of settings that are lost when it is read."""

    settings: tuple[object, ...]
    losses: frozenset[str]


def edits(mine: Table, exported: Table, meaning: Callable[[Table], Meaning]) -> list[Edit]:
    """The fewest edits after which `mine` has the meaning of `exported`."""
    wanted = meaning(exported)
    if _means(mine, meaning, wanted._replace(losses=wanted.losses | _losses(mine, meaning))):
        return []
    # No edit may lose more than either file does.
    losses = wanted.losses | _losses(mine, meaning)
    wanted = wanted._replace(losses=losses)
    before, after = dict(_leaves(mine)), dict(_leaves(exported))
    found = [
        Edit(key, before.get(key, ABSENT), after.get(key, ABSENT))
        for key in list({**before, **after})[:_MOST_KEYS]
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    ]
    # Keys of the user's that the exported file lacks are tried first, most of which have no effect;
    # then whole sections, whose keys may mean something together only; then one by one.
    sections = [[edit for edit in found if edit.key[0] == key] for key in exported]
    for group in (*_alone(found, False), *sections, *_alone(found, True)):
        fewer = [edit for edit in found if edit not in group]
        if len(fewer) < len(found) and _means(_edited(mine, fewer), meaning, wanted):
            found = fewer
    return found


def _alone(found: list[Edit], added: bool) -> list[list[Edit]]:
    """Each edit on its own: those that set a key if `added`, else those that leave one out."""
    return [[edit] for edit in found if (edit.new is not ABSENT) is added]


def _means(table: Table, meaning: Callable[[Table], Meaning], wanted: Meaning) -> bool:
    """Whether a file means what is wanted; False for one that cannot be read."""
    try:
        found = meaning(table)
    except SpecError:
        return False
    return found.settings == wanted.settings and found.losses <= wanted.losses


def _losses(table: Table, meaning: Callable[[Table], Meaning]) -> frozenset[str]:
    """The keys of settings that are lost when a file is read; empty if it cannot be."""
    try:
        return meaning(table).losses
    except SpecError:
        return frozenset()


def _meaning(found: Imported, run: RunSpec) -> Meaning:
    """What a file settles of a run, without settings that have no effect in it."""
    cluster = run.cluster
    fields = imported_strategy(found, cluster.devices)
    strategy = Strategy.read(fields).resolve(cluster.devices, cluster.devices_per_node)
    idle = without_effect(strategy)
    # A run that names no kernel is content with the one that packing needs.
    unnamed = [name for name in ("attention", "dispatch") if getattr(run.strategy, name) is None]
    idle = {*idle, *unnamed}
    settings = strategy.model_dump(exclude=idle)
    train = TrainSettings.read(found.train)
    if train.warmup_steps == 1:
        # The first step of one has the full learning rate.
        train = train.but(warmup_steps=0)
    lost = frozenset(one.key for one in found.outcomes if one.is_lost)
    said = (
        settings,
        {"seq_len": None, **found.job},
        train.model_dump(exclude=unused_settings(run, train)),
        _adapter(found),
        found.data.get("packing"),
        # A file that does not say on how many devices it runs leaves that to the launcher.
        found.processes or cluster.devices,
    )
    return Meaning(said, lost)


def _adapter(found: Imported) -> object:
    """The adapter that a file settles, its alpha as a number; None without one."""
    if not found.adapter:
        return None
    adapter = Adapter.read(found.adapter)
    return adapter.model_dump(exclude={"alpha"}), adapter.scale


def yaml_table(text: str) -> dict[str, object]:
    """The table of an exported YAML or JSON."""
    import yaml

    table: dict[str, object] = yaml.safe_load(text)
    return table


def _leaves(table: Table, inside: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value of a nested table with the path of its keys."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*inside, key))
        else:
            yield (*inside, key), value


def _edited(table: Table, changes: list[Edit]) -> dict[str, object]:
    """The table with these edits."""
    leaves = dict(_leaves(table))
    for edit in changes:
        leaves.pop(edit.key, None)
        if edit.new is not ABSENT:
            leaves[edit.key] = edit.new
    made: dict[str, Any] = {}
    for path, value in leaves.items():
        here = made
        for key in path[:-1]:
            inner = here.get(key)
            if not isinstance(inner, dict):
                inner = here[key] = {}
            here = inner
        here[path[-1]] = value
    return made
