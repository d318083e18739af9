"""The order in which FSDP2 and autograd hold and drop memory through a step, as ledgers.

As torch 2.13 does it:

- Forward gathers a unit into a flat buffer, copies it out, and drops the buffer only when the next
  unit has been copied out. The root is gathered first and kept until the end of the backward.
- Backward gathers the next unit while it works on this one; a finished unit's gradients are copied
  into a reduce-scatter input, of which one is in flight.
- The root's gradients (head first, embedding last) are reduced when everything else is done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Configurations, Floats, Ints
from shardwise.predict.traffic import padded_rows
from shardwise.predict.work import recomputed_blocks, sum_by_unit
from shardwise.units.unit import ModelUnits, Policy, Unit

TERMS = (
    "parameters",
    "gradients",
    "optimizer",
    "unsharded_parameters",
    "unsharded_gradients",
    "reduce_buffers",
    "activations",
    "logits",
    "other",
)
# Token ids and labels, 8 bytes each.
BATCH_BYTES_PER_TOKEN = 16.0
# The loss is computed in fp32 at least.
LOSS_BYTES = 4

Ledger = dict[str, Floats]


def sum_terms(ledger: Ledger) -> Floats:
    first, *rest = (ledger[term] for term in TERMS)
    total: Floats = first.copy()
    for term in rest:
        total += term
    return total


class MicroBatch(NamedTuple):
    """First, middle and last micro-batch of a step differ in what they find and what they leave."""

    exists: Bools
    # Gradients of earlier micro-batches are there.
    earlier: Bools
    # The last one: gradients are reduced and parameters resharded, whatever the settings.
    final: Bools


class Step:
    """The quantities the phases share. Arrays are (rows,) or (rows, blocks), the root apart."""

    def __init__(self, units: ModelUnits, c: Configurations, optimizer_states: int) -> None:
        self.units, self.c = units, c
        self.rows = len(c)
        padded = padded_rows(units, c.shard).astype(np.float64)
        self.blocks, self.root = padded[:, :-1], padded[:, -1]
        self.all_blocks = self.blocks.sum(axis=1)
        self.whole = padded.sum(axis=1)
        self.tokens = c.micro_batch * float(units.seq_len)
        self.states = optimizer_states

        # Parameters are whole on every device at all times: no gathering, no scattering.
        self.replicated = ~c.sharded
        self.mixed = c.param_bytes != c.master_bytes
        self.repeats = c.accumulate > 1
        # Gradients stay whole from micro-batch to micro-batch, in the reduce dtype.
        self.sums_whole = c.sharded & self.repeats & ~c.shard_sync_every

        # Of an element of a sharded gradient between two micro-batches.
        every = c.replicate_sync_every | (c.replicate == 1)
        self.between_bytes = np.where(every, c.master_bytes, c.reduce_bytes)

        # Of single blocks: each recomputes by itself, however many are in a unit.
        self.singles = units.single_blocks
        self.first_single = [0]
        for unit in units.blocks:
            self.first_single.append(self.first_single[-1] + len(unit.blocks))
        self.recomputed = recomputed_blocks(c, len(self.singles))
        # The first block that does not recompute, of every row.
        self.boundaries = {int(edge) for edge in self.recomputed.sum(axis=1)}
        kept = self._kept_per_block()
        self.kept_below = np.cumsum(kept, axis=1) - kept
        self.kept = sum_by_unit(kept, units)
        # Elements of the units below the first, the second, ... and of all.
        self.elements_below = _sums_below(self.blocks)
        # The same of single blocks; and of those of them that autograd keeps autocast's copies of.
        elements = np.asarray([[float(block.numel) for block in self.singles]])
        self.single_elements_below = _sums_below(elements)
        copies_again = self.recomputed | c.selective[:, None]
        self.kept_copies_below = _sums_below(np.where(copies_again, 0.0, elements))
        self.head = units.root.stage
        self.head_elements = max(m.gradient_elements for m in self.head.backward)
        self.micro_batches = self._micro_batches()
        # What is alive at all times.
        on_device = np.where(c.offload, 0.0, 1.0)
        state = self.whole / c.shard * c.master_bytes * on_device
        self.resting: Ledger = dict.fromkeys(TERMS, np.zeros(self.rows))
        self.resting |= {"parameters": state, "optimizer": state * self.states}
        self.resting["other"] = self.tokens * BATCH_BYTES_PER_TOKEN

    def _micro_batches(self) -> list[MicroBatch]:
        k = self.c.accumulate
        every, none = np.ones(self.rows, dtype=np.bool_), np.zeros(self.rows, dtype=np.bool_)
        found = [
            MicroBatch(exists=every, earlier=none, final=k == 1),
            MicroBatch(exists=k > 2, earlier=every, final=none),
            MicroBatch(exists=k > 1, earlier=every, final=every),
        ]
        return [m for m in found if m.exists.any()]

    def _kept_per_block(self) -> Floats:
        """Bytes per token each block keeps for its backward, under its row's policy."""

        def column(policy: Policy) -> Floats:
            kinds = {id(b): b.stage.kept[policy].activation_bytes for b in self.singles}
            return np.asarray([kinds[id(b)] for b in self.singles], dtype=np.float64)

        selective = self.c.selective[:, None]
        chosen = np.where(selective, column("selective"), column("none"))
        kept: Floats = np.where(self.recomputed, column("full"), chosen)
        return kept

    # ---- terms ----------------------------------------------------------------------------

    def ledger(self, **terms: Floats) -> Ledger:
        """What is alive at all times, and `terms`."""
        return self.resting | terms

    def _gradients(self, m: MicroBatch, done: Floats, root_made: float) -> Floats:
        """Gradients where the optimizer will find them, when `done` elements are final.

        `root_made` elements of the root count only where nothing is sharded.
        """
        c = self.c
        finished = np.where(m.final, c.master_bytes, self.between_bytes)
        earlier = np.where(m.earlier, (self.whole - done) * self.between_bytes, 0.0)
        scattered = done * finished + earlier
        only_last = np.where(m.final, done * c.master_bytes, 0.0)
        sharded = np.where(c.shard_sync_every, scattered, only_last) / c.shard
        alone = np.where(m.earlier, self.whole, done + root_made)
        replicated = np.where(c.ddp, self.whole, alone) * c.master_bytes
        gradients: Floats = np.where(self.replicated, replicated, sharded)
        return np.where(c.offload, 0.0, gradients)

    def _reduces(self, m: MicroBatch) -> Bools:
        """Whether this micro-batch scatters its gradients."""
        reduces: Bools = self.c.sharded & (m.final | self.c.shard_sync_every)
        return reduces

    def _accumulators(self, m: MicroBatch, done: Floats) -> Floats:
        """Whole gradients kept across micro-batches, when `done` elements have had their turn."""
        alive = np.where(m.earlier, self.whole - done, 0.0) + np.where(m.final, 0.0, done)
        return np.where(self.sums_whole, alive * self.c.reduce_bytes, 0.0)

    def _added_in_place(self, m: MicroBatch) -> Bools:
        """Whether a new gradient is added to one that is there, instead of taking its place."""
        c = self.c
        whole = self.sums_whole & m.earlier & (c.param_bytes == c.reduce_bytes)
        in_place: Bools = np.where(self.replicated, c.ddp | m.earlier | self.mixed, whole)
        return in_place

    def _new_gradients(self, m: MicroBatch, unit: Unit, made: float, padded: Floats) -> Floats:
        """Bytes of the gradients autograd has made of `unit` and not handed on."""
        c = self.c
        largest = min(float(max((p.numel for p in unit.parameters), default=0)), made)
        elsewhere = np.where(self.replicated, 0.0, np.minimum(made, padded))
        # A matmul under autocast makes its weight's gradient in the compute dtype. Its copy of the
        # weight is dropped, the gradient cast, and the cast one added to that which is there.
        cast = self.replicated & self.mixed & (c.ddp | m.earlier)
        in_place = largest * np.where(cast, c.master_bytes, c.param_bytes)
        fresh: Floats = np.where(self._added_in_place(m), in_place, elsewhere * c.param_bytes)
        return fresh

    def _head_gradients(self, m: MicroBatch) -> Floats:
        """The root's first gradients, whole until everything else is reduced.

        Gradients that are added in place need no memory of their own, unless the table is tied:
        then autograd holds the head's gradient until it has the embedding's.
        """
        c, in_place = self.c, self._added_in_place(m)
        elements = np.where(in_place, self._tied_elements, self.head_elements)
        alone = np.where(in_place, self._tied_elements, 0.0) * c.master_bytes
        return np.where(self.replicated, alone, elements * c.param_bytes)

    @property
    def _tied_elements(self) -> float:
        """Elements of the table that embedding and head share; 0 if each has its own."""
        sizes = [float(p.numel) for p in self.units.root.parameters]
        return max(sizes, default=0.0) if self.units.tied else 0.0

    def _working(self, gathered: Floats, copied: Floats) -> Floats:
        """Bytes of gathered parameters (sharded kinds) or of autocast's copies (replicated)."""
        if not self.replicated.any():
            return gathered * self.c.param_bytes
        copies = np.where(self.mixed, copied, 0.0)
        return np.where(self.replicated, copies, gathered) * self.c.param_bytes

    # Autocast copies the weights of matmuls and caches the copies until the model's forward
    # returns, so during it those of all blocks so far are alive, whether they recompute or not.
    # After it only those are left that autograd has saved: of blocks that do not recompute, and of
    # the one whose backward runs, which has copied its weights again if it recomputes.

    def _cached_copies(self, blocks: int) -> Floats:
        """Elements that autocast has copied when the forward has reached this many blocks."""
        return self.single_elements_below[:, blocks]

    def _saved_copies(self, blocks: int, *, running: bool = False) -> Floats:
        """Elements autograd holds copies of for these first blocks; the last may be running."""
        if not running:
            return self.kept_copies_below[:, blocks]
        own = self.single_elements_below[:, blocks] - self.single_elements_below[:, blocks - 1]
        return self.kept_copies_below[:, blocks - 1] + own

    @property
    def _head_copies(self) -> Floats:
        """Elements of the root that a matmul reads."""
        return self.root - (self.units.embedding_gradient_elements - self._tied_elements)

    def _post_forward_shards(self, waiting: Floats) -> Floats:
        """An integer reshard keeps a larger shard of each unit between forward and backward."""
        group = np.maximum(self.c.reshard_group, 1)
        return np.where(self.c.reshard_group > 0, waiting / group, 0.0)

    def _left_gathered(self, m: MicroBatch, done: Floats) -> Floats:
        """Units whose backward is over and that stay gathered for the next micro-batch."""
        return np.where(m.final | self.c.reshard_backward, 0.0, done)

    def _last_buffer(self) -> Floats:
        """The flat buffer of the last block's gather."""
        last = self.blocks[:, -1] if self.blocks.shape[1] else np.zeros(self.rows)
        return np.where(self.c.sharded & (self.c.shard > 1), last, 0.0)

    def _all_reduce_inputs(self, m: MicroBatch, reduced: Floats) -> Floats:
        """Hybrid sharding keeps what it all-reduces until the backward ends.

        Mostly the gradients are that very memory; not if their dtype is another, or if they are
        added to those of an earlier micro-batch.
        """
        c = self.c
        added = m.earlier & c.replicate_sync_every
        apart = c.sharded & (c.replicate > 1) & ((c.reduce_bytes != c.master_bytes) | added)
        return np.where(apart, reduced / c.shard * c.reduce_bytes, 0.0)

    # ---- phases ---------------------------------------------------------------------------

    def largest(self, phase: Callable[[MicroBatch], Iterator[Ledger]]) -> Ledger:
        """The largest instant of a phase over its moments and the micro-batches of a step."""
        best: Ledger = {}
        most: Floats = np.zeros(0)
        for micro_batch in self.micro_batches:
            for ledger in phase(micro_batch):
                total = sum_terms(ledger)
                if not best:
                    best, most = {term: ledger[term].copy() for term in TERMS}, total
                    continue
                larger = micro_batch.exists & (total > most)
                if larger.any():
                    np.copyto(most, total, where=larger)
                    for term in TERMS:
                        np.copyto(best[term], ledger[term], where=larger)
        return best

    def _around_the_head(self, m: MicroBatch, block_copies: Floats) -> Ledger:
        """What the end of the forward and the loss have in common, but for autocast's copies.

        The loss lies outside the model: the last block's buffer is dropped before it, and the
        backward's first prefetch comes after it.
        """
        gathered = np.where(self.c.reshard_forward, self.root, self.whole)
        gathered = gathered + self._post_forward_shards(self.all_blocks)
        nothing = np.zeros(self.rows)
        return self.ledger(
            unsharded_parameters=self._working(gathered, block_copies + self._head_copies),
            gradients=self._gradients(m, nothing, 0.0),
            unsharded_gradients=self._accumulators(m, nothing),
            activations=self.kept.sum(axis=1) * self.tokens,
        )

    def block_forward(self, m: MicroBatch, index: int) -> Iterator[Ledger]:
        """A block at work; the flat buffer it was gathered into is still there."""
        size, below = self.blocks[:, index], self.elements_below[:, index]
        gathers = (self.c.shard > 1) & (~m.earlier | self.c.reshard_backward)
        buffer = np.where(self.c.sharded & gathers, size, 0.0)
        before = np.where(self.c.reshard_forward, self._post_forward_shards(below), below)
        nothing = np.zeros(self.rows)
        gathered = self.root + size + buffer + before
        base = self.ledger(
            gradients=self._gradients(m, nothing, 0.0),
            unsharded_gradients=self._accumulators(m, nothing),
        )
        for single in self._singles_that_can_peak(index):
            stage = self.singles[single].stage
            saving, transient = stage.forward_peak, stage.forward_peak_unsaved or stage.forward_peak
            working = np.where(
                self.recomputed[:, single], transient.activation_bytes, saving.activation_bytes
            )
            yield base | {
                "unsharded_parameters": self._working(gathered, self._cached_copies(single + 1)),
                "activations": (self.kept_below[:, single] + working) * self.tokens,
            }

    def forward(self, m: MicroBatch) -> Iterator[Ledger]:
        """Memory grows from block to block: the last of each kind decides."""
        if not self.units.blocks:
            yield self._around_the_head(m, self._cached_copies(0))
        last = {id(unit): index for index, unit in enumerate(self.units.blocks)}
        for index in last.values():
            yield from self.block_forward(m, index)

    def end_of_forward(self, m: MicroBatch) -> Iterator[Ledger]:
        ledger = self._around_the_head(m, self._cached_copies(len(self.singles)))
        peak = self.head.forward_peak
        # While the head runs, the last block's buffer is still there, and of the logits no more
        # than the head itself makes.
        gathers = ~m.earlier | self.c.reshard_backward
        buffer = np.where(gathers, self._last_buffer(), 0.0) * self.c.param_bytes
        made = self.c.param_bytes / (np.maximum(self.c.param_bytes, LOSS_BYTES) + LOSS_BYTES)
        yield ledger | {
            "unsharded_parameters": ledger["unsharded_parameters"] + buffer,
            "activations": ledger["activations"] + peak.activation_bytes * self.tokens,
            "logits": peak.logit_bytes * made * self.tokens,
        }
        # The loss lies outside the model's forward, whose cache of copies is gone.
        ledger = self._around_the_head(m, self._saved_copies(len(self.singles)))
        ledger["activations"] = ledger["activations"] + peak.activation_bytes * self.tokens
        ledger["logits"] = peak.logit_bytes * self.tokens
        yield ledger

    def loss_backward(self, m: MicroBatch) -> Iterator[Ledger]:
        base = self._around_the_head(m, self._saved_copies(len(self.singles)))
        for moment in self.head.backward:
            made = moment.gradient_elements
            new = self._new_gradients(m, self.units.root, made, self.root)
            yield base | {
                "activations": base["activations"] + moment.activation_bytes * self.tokens,
                "logits": moment.logit_bytes * self.tokens,
                "unsharded_gradients": base["unsharded_gradients"] + new,
                "gradients": self._gradients(m, np.zeros(self.rows), made),
            }

    def steady_backward(self, m: MicroBatch) -> Iterator[Ledger]:
        """The largest instant of any block's backward."""
        if not self.units.blocks:
            yield self._around_the_head(m, self._saved_copies(0))
        for index in self._blocks_that_can_peak():
            yield from self.block_backward(m, index)

    def _blocks_that_can_peak(self) -> list[int]:
        """Among equal blocks memory changes evenly from one to the next, so the ends decide.

        Ends are the first and last block of each kind, of the blocks that recompute, and of those
        whose neighbours exist.
        """
        blocks = self.units.blocks
        ends: dict[int, list[int]] = {}
        for index, block in enumerate(blocks):
            ends.setdefault(id(block), [index, index])[1] = index
        boundaries = {bisect_right(self.first_single, edge) - 1 for edge in self.boundaries}
        reach = max(len(ends), int(self.c.prefetch.max(initial=0)))
        found = {index for pair in ends.values() for index in pair}
        for edge in (0, len(blocks), *boundaries):
            found |= set(range(edge - len(ends) - 1, edge + reach + 1))
        return sorted(index for index in found if 0 <= index < len(blocks))

    def _singles_that_can_peak(self, index: int) -> list[int]:
        """The blocks of a unit at which its memory can be largest: where something changes."""
        first, end = self.first_single[index], self.first_single[index + 1]
        # From the last but one on, gradients that are added in place are as large as they get.
        found = [first, end - 1, max(first, end - 2)]
        for single in range(first + 1, end):
            if single in self.boundaries or self.singles[single] is not self.singles[single - 1]:
                found += [single - 1, single]
        return sorted(set(found))

    def block_backward(self, m: MicroBatch, index: int) -> Iterator[Ledger]:
        c, block = self.c, self.units.blocks[index]
        size = self.blocks[:, index]
        above = self.all_blocks - self.elements_below[:, index + 1]
        below = self.elements_below[:, index]
        following = self.blocks[:, index + 1] if index + 1 < len(self.units.blocks) else 0.0 * size
        syncs = self._reduces(m)
        in_flight = np.where(syncs, following, 0.0) * c.reduce_bytes
        prefetched = np.where(
            c.reshard_forward & c.sharded, _prefetched(self.blocks, index, c.prefetch), 0.0
        )
        others = (
            self.root
            + np.where(c.reshard_forward, 0.0, below)
            + self._left_gathered(m, above)
            + self._post_forward_shards(below)
        )
        kept_below = self.kept_below[:, self.first_single[index]] * self.tokens
        whole_sums, head = self._accumulators(m, above), self._head_gradients(m)

        # Copied out of the flat buffer it was gathered into. After an integer reshard it was
        # gathered from the unit's own larger shard, which is dropped when all is copied out.
        buffer = np.where(c.reshard_forward & c.sharded & (c.shard > 1), size, 0.0)
        buffer = buffer + self._post_forward_shards(size)
        saved = self._saved_copies(self.first_single[index + 1])
        yield self.ledger(
            unsharded_parameters=self._working(others + size + buffer, saved),
            gradients=self._gradients(m, above, self.head_elements),
            unsharded_gradients=whole_sums + head,
            reduce_buffers=in_flight + self._all_reduce_inputs(m, above),
            activations=kept_below
            + (self.kept[:, index] + self.units.boundary_bytes) * self.tokens,
        )
        others = others + prefetched
        for single in self._singles_that_can_peak(index):
            stage = self.singles[single].stage
            unread = np.where(
                c.selective & ~self.recomputed[:, single], stage.kept["selective"].unread_bytes, 0.0
            )
            later = self.singles[single + 1 : self.first_single[index + 1]]
            made_before = float(sum(other.numel for other in later))
            saved = self._saved_copies(single + 1, running=True)
            for moment in stage.backward:
                made = moment.gradient_elements + made_before
                yield self.ledger(
                    unsharded_parameters=self._working(others + size, saved),
                    gradients=self._gradients(m, above, made + self.head_elements),
                    unsharded_gradients=whole_sums
                    + head
                    + self._new_gradients(m, block, made, size),
                    reduce_buffers=in_flight + self._all_reduce_inputs(m, above),
                    activations=self.kept_below[:, single] * self.tokens
                    + (moment.activation_bytes + unread) * self.tokens,
                )

        yield from self._reduction(
            m,
            unit=block,
            size=size,
            done=above,
            gathered=others + self._left_gathered(m, size),
            copied=self._saved_copies(self.first_single[index]),
            head=head,
            activations=kept_below + self.units.boundary_bytes * self.tokens,
        )

    def _reduction(
        self,
        m: MicroBatch,
        *,
        unit: Unit,
        size: Floats,
        done: Floats,
        gathered: Floats,
        copied: Floats,
        head: Floats,
        activations: Floats,
    ) -> Iterator[Ledger]:
        """A unit's gradients are copied into the reduce-scatter input, dropped, and scattered.

        Its parameters are resharded first. While the collective runs, the engine still refers to
        the gradient of the unit's last parameter.
        """
        c = self.c
        syncs = self._reduces(m)
        largest = float(max((p.numel for p in unit.parameters), default=0)) * c.param_bytes
        last = float(unit.parameters[-1].numel if unit.parameters else 0) * c.param_bytes
        own = np.where(self.sums_whole & m.earlier, 0.0, size * c.param_bytes)
        after = self._accumulators(m, done + size) + head
        before = self._accumulators(m, done) + head
        scatter_input = np.where(syncs, size * c.reduce_bytes, 0.0)
        root_made = 0.0 if unit is self.units.root else self.head_elements
        copying = self.ledger(
            unsharded_parameters=self._working(gathered, copied),
            gradients=self._gradients(m, np.where(syncs, done, done + size), root_made),
            unsharded_gradients=np.where(
                self.replicated, 0.0, np.where(syncs, before + own, after + largest)
            ),
            reduce_buffers=scatter_input + self._all_reduce_inputs(m, done),
            activations=activations,
        )
        yield copying
        # Added to what earlier micro-batches left, a new shard exists beside the old one.
        beside = np.where(syncs & c.shard_sync_every & m.earlier, size / c.shard, 0.0)
        yield copying | {
            "gradients": self._gradients(m, done + size, root_made),
            "unsharded_gradients": np.where(
                self.replicated, 0.0, after + np.where(syncs, last, 0.0)
            ),
            "reduce_buffers": scatter_input
            + self._all_reduce_inputs(m, done + size)
            + beside * c.reduce_bytes,
        }

    def last_backward(self, m: MicroBatch) -> Iterator[Ledger]:
        """The embedding's gradient, then the reduction of the whole root."""
        c, root = self.c, self.units.root
        syncs = self._reduces(m)
        first = self.blocks[:, 0] if self.units.blocks else np.zeros(self.rows)
        left = self._left_gathered(m, self.all_blocks)
        whole_sums = self._accumulators(m, self.all_blocks)
        embedding = self.units.embedding_gradient_elements
        # A tied table receives the embedding's gradient beside the head's, and autograd adds the
        # two into a third.
        table = self._tied_elements
        in_place = self._added_in_place(m)
        # Autocast leaves the embedding alone: its gradient, and the sum, are of the master dtype.
        added = embedding if table == 0 else 2.0 * table
        alone = np.where(in_place, added, 2.0 * table) * c.master_bytes
        fresh = np.where(self.replicated, alone, (embedding + table) * c.param_bytes)
        yield self.ledger(
            unsharded_parameters=self._working(self.root + left, self._saved_copies(0)),
            gradients=self._gradients(m, self.all_blocks, float(root.numel)),
            unsharded_gradients=whole_sums + self._head_gradients(m) + fresh,
            reduce_buffers=np.where(syncs, first, 0.0) * c.reduce_bytes
            + self._all_reduce_inputs(m, self.all_blocks),
            activations=np.full(self.rows, self.units.boundary_bytes) * self.tokens,
        )
        yield from self._reduction(
            m,
            unit=root,
            size=self.root,
            done=self.all_blocks,
            gathered=left + self._left_gathered(m, self.root),
            copied=self._saved_copies(0),
            head=np.zeros(self.rows),
            activations=np.zeros(self.rows),
        )

    def optimizer_step(self) -> Ledger:
        """Fused optimizers update in place: no temporaries."""
        state = self.whole / self.c.shard * self.c.master_bytes
        return self.ledger(
            gradients=np.where(self.c.offload, 0.0, state), other=np.zeros(self.rows)
        )


def _sums_below(columns: Floats) -> Floats:
    nothing = np.zeros((len(columns), 1))
    return np.concatenate([nothing, np.cumsum(columns, axis=1)], axis=1)


def _prefetched(blocks: Floats, index: int, depth: Ints) -> Floats:
    """Flat buffers of the units gathered ahead of block `index`, which are those before it."""
    total = np.zeros(len(blocks))
    for step in range(1, int(depth.max(initial=0)) + 1):
        if index - step >= 0:
            total = total + np.where(depth >= step, blocks[:, index - step], 0.0)
    return total
