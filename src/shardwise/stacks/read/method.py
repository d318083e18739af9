"""Read DPO of other stacks as `job.method`, whose micro-batches count sequences, not pairs."""

from __future__ import annotations

from shardwise.stacks.outcomes import Outcome
from shardwise.stacks.read.imported import Imported

DPO = "DPO"
_PAIRS = ": pairs of a chosen and a rejected sequence"


def as_dpo(found: Imported, key: str, reference: bool, why: str = "") -> Imported:
    """The settings of a file that trains with DPO.

    Args:
        found: The settings, read as if they were of supervised fine-tuning.
        key: What says that the file trains with DPO.
        reference: Whether a reference model runs during training.
        why: Why there is none.
    """
    strategy, job = dict(found.strategy), {**found.job, "method": "dpo"}
    micro_batch = strategy.get("micro_batch")
    if isinstance(micro_batch, int):
        strategy["micro_batch"] = 2 * micro_batch
    fields: dict[str, object] = {"job.method": "dpo"}
    if not reference:
        fields["job.reference"] = job["reference"] = False
    method = Outcome("given", key, fields=fields, why=f": {why}" if why else "")
    outcomes = (method, *(_in_sequences(one) for one in found.outcomes))
    # Pairs are padded, never packed.
    data = {name: value for name, value in found.data.items() if name != "packing"}
    return found._replace(strategy=strategy, job=job, data=data, outcomes=outcomes, objective=DPO)


def _in_sequences(one: Outcome) -> Outcome:
    """The outcome, with its micro-batch of pairs as one of sequences."""
    pairs = one.fields.get("micro_batch")
    if not isinstance(pairs, int):
        return one
    return one._replace(fields={**one.fields, "micro_batch": 2 * pairs}, why=_PAIRS)
