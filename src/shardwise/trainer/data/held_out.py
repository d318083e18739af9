"""The held-out micro-batches of one rank: the same sequences in every evaluation of a run.

All ranks together take the sequences in rounds. In the last round some ranks have fewer, and their
other rows count for nothing, so that all take part in the collectives of every forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.engine.head_with_loss import IGNORED
from shardwise.engine.materialize import named_seed
from shardwise.spec.evaluation import EvalSettings
from shardwise.trainer.data.batches import Batches, Layout, MicroBatch, make_batches
from shardwise.trainer.data.packing import PADDING

# Positions per evaluation, unless the settings say how many.
MOST_TOKENS, ENDLESS_TOKENS = 2**20, 2**14
# Seed of the order of held-out sequences: equal in all runs, so that their losses can be compared.
_ORDER = 0


class HeldOut:
    """The held-out sequences of this rank."""

    def __init__(
        self, settings: EvalSettings, layout: Layout, vocab: int | None, seed: int
    ) -> None:
        """`layout` is that of training, `seed` the run's, `vocab` the size of the vocabulary."""
        self._data, self._vocab = settings.data, vocab
        self._layout = layout._replace(accumulate=1, first_step=0, first_sequence=0, counts=())
        # Synthetic sequences are drawn from the seed: these must differ from those of training.
        self._seed = named_seed(seed, "held-out") if settings.data.synthetic else _ORDER
        self._batches = self._open()
        # An iterable is read anew in each evaluation.
        self._is_used = False
        count, seq_len = self._batches.count, layout.seq_len
        most = settings.tokens or (ENDLESS_TOKENS if count is None else MOST_TOKENS)
        # Sequences of one evaluation.
        self.count = -(-most // seq_len) if count is None else min(count, -(-most // seq_len))

    @property
    def is_packed(self) -> bool:
        """Whether sequences hold several examples."""
        statistics = self._batches.statistics
        return statistics is not None and statistics.packing

    @property
    def empty(self) -> MicroBatch:
        """A micro-batch without a token that counts for the loss, for a rank whose data ended."""
        shape = self._layout.micro_batch, self._layout.seq_len
        return MicroBatch(torch.full(shape, PADDING), torch.full(shape, IGNORED))

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batch of each round; fewer if its own iterable ends before."""
        if self._data.source is not None and self._is_used:
            self._batches = self._open()
        self._is_used = True
        rounds = -(-self.count // self._layout.sequences_per_step)
        for number in range(rounds):
            for batch in self._batches.at(number):
                yield self._counted(batch, number)

    def _open(self) -> Batches:
        layout, vocab, seed = self._layout, self._vocab, self._seed
        return make_batches(self._data, layout, vocab, seed, keep_rest=True)

    def _counted(self, batch: MicroBatch, number: int) -> MicroBatch:
        """The micro-batch of a round, without the targets of rows beyond the last sequence."""
        beyond = torch.from_numpy(self._layout.positions(number)[0] >= self.count)
        return batch._replace(targets=batch.targets.masked_fill(beyond[:, None], IGNORED))
