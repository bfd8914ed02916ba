"""Splits a step into forward passes that fit buckets.

    decodes    all requests with one token, or with drafts to verify, in as few forward passes as
               the largest bucket allows; requests without drafts are padded to the same length
    prefills   a prompt longer than the longest bucket in chunks; neighbours share a forward pass
               if padding them to one shape costs less than another forward pass

The catalog is closed (`bucketing/catalog/closure`), so every batch has a bucket. If that is ever
wrong, the batch runs in its own shape: this compiles and is logged, but no request fails.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm.attention.backends.hpu_metadata import DecodeBlockCounts, count_decode_blocks
from vllm.bucketing import Bucket, Phase, StepLimits
from vllm.bucketing.catalog.catalog import Catalog, padded_cost
from vllm.bucketing.step_limits import round_up
from vllm.cost_model.padded import GATHER_COST, PREFILL_LAUNCH_COST
from vllm.messages import IntArray, SchedulerOutput
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch
from vllm.worker.hpu.launches.late_shapes import LateShapes

Sizes = tuple[int, int, int]
"""Batch, query length and blocks."""


@dataclass(frozen=True, slots=True)
class PaddedLaunch(Launch):
    """A forward pass that is padded to a bucket."""

    bucket: Bucket
    is_contiguous: bool = False
    """Decode: the first `bucket.blocks` blocks of the cache are read as a slice."""
    merged_prompts: int = 0
    """For a prefill: maximum number of prompts that are joined to one sequence; 0: prompts are not
    joined."""
    num_shared: int = 0
    """Number of entries for references to shared blocks; see `PaddedShape`."""
    item_slots: int = 0
    """Slots that each row reads by cross-attention, as in `PaddedShape`."""
    needed: Sizes | None = None
    """Batch, query length and blocks that its bucket has to cover; None: it is padding only."""
    kept_replays: IntArray | None = field(default=None, kw_only=True)
    """[k, 3] the `SchedulerOutput.kept_states` before or at the end of replayed tokens, at most one
    of each row; None: there are none."""

    @property
    def tokens_with_logits(self) -> int:
        """Number of tokens per request that have logits: the last one of a prompt, all of
        a decode.
        """
        return self.bucket.query_len if self.bucket.phase is Phase.DECODE else 1

    @property
    def starts(self) -> IntArray:
        """[n] index of the first token of each request among the padded tokens."""
        if self.merged_prompts:
            count = self.num_scheduled_tokens
            return np.cumsum(count, dtype=np.int32) - count
        return np.arange(len(self.rows), dtype=np.int32) * np.int32(self.bucket.query_len)

    @property
    def shape(self) -> "PaddedShape":
        """The padded shape, which decides which compiled recipe runs."""
        return PaddedShape(
            self.bucket, self.is_contiguous, self.merged_prompts, self.num_shared, self.item_slots
        )


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """Padded sizes of a forward pass: the key of what is compiled, captured and warmed up."""

    bucket: Bucket
    is_contiguous: bool = False
    merged_prompts: int = 0
    num_shared: int = 0
    """Number of entries, in addition to the slice of a contiguous decode, for references to blocks
    that another request of the launch also has; they are gathered."""
    item_slots: int = 0
    """Slots that each row reads by cross-attention; 0: as many as a request may have."""

    @property
    def num_rows(self) -> int:
        """Number of tokens that have logits: all of a decode, the last one of each prompt."""
        if self.bucket.phase is Phase.DECODE:
            return self.bucket.num_tokens
        return self.merged_prompts or self.bucket.batch

    @property
    def num_entries(self) -> int:
        """Number of entries of the block list of a decode."""
        return self.bucket.blocks + self.num_shared

    @property
    def read_cost(self) -> int:
        """Cost of the attention of a decode, in units of one block read from a contiguous slice."""
        num_sliced = self.bucket.blocks if self.is_contiguous else 0
        return num_sliced + GATHER_COST * (self.num_entries - num_sliced)

    @property
    def cost(self) -> int:
        """Cost of a batch of this shape, in the unit of `padded_cost`."""
        if self.bucket.phase is Phase.DECODE:
            return self.bucket.num_tokens + self.read_cost
        return padded_cost(self.bucket)


def launch_shapes(
    bucket: Bucket, limits: StepLimits, merged_prompts: int = 0, item_sizes: Sequence[int] = (0,)
) -> list[PaddedShape]:
    """Return every shape in which batches of a bucket can run.

    With contiguous access a decode reads a slice of the cache or gathers blocks, whichever costs
    less for the blocks of its sequences.

    Args:
        bucket: bucket of the batches.
        limits: limits of a step.
        merged_prompts: whether prompts are merged; see `PaddedShape`.
        item_sizes: values of `PaddedShape.item_slots`.
    """
    return [
        replace(shape, item_slots=size)
        for shape in _shapes_of_bucket(bucket, limits, merged_prompts)
        for size in item_sizes
    ]


def _shapes_of_bucket(bucket: Bucket, limits: StepLimits, merged_prompts: int) -> list[PaddedShape]:
    plain = PaddedShape(bucket)
    if bucket.phase is Phase.PREFILL:
        return [PaddedShape(bucket, merged_prompts=merged_prompts)]
    if not limits.contiguous_pa:
        return [plain]
    sliced = _sliced_shapes(bucket, limits)
    if bucket.blocks == limits.num_blocks and not limits.enable_prefix_caching:
        # A slice of the whole cache fits any decode, so blocks never have to be gathered.
        return sliced
    return [*sliced, plain]


def _sliced_shapes(bucket: Bucket, limits: StepLimits) -> list[PaddedShape]:
    """Return the shapes of decodes that read a contiguous slice of the cache, cheapest first.

    There is one without and there are others with space for blocks that several requests share.
    Shapes that cost more than gathering all blocks are left out. Empty if the cache has no such
    slice.
    """
    if limits.num_blocks is not None and bucket.blocks > limits.num_blocks:
        return []
    exact = PaddedShape(bucket, is_contiguous=True)
    if not limits.enable_prefix_caching:  # no two rows share a block
        return [exact]
    shapes = [exact, replace(exact, num_shared=bucket.batch)]
    most = bucket.batch * limits.max_blocks_per_seq
    return [shape for shape in shapes if shape.read_cost <= GATHER_COST * most]


class _Rows(NamedTuple):
    """The tokens that a forward pass, or a part of a step, runs, request by request.

    A request may occur twice, in the order of its tokens.
    """

    ids: IntArray
    computed: IntArray
    scheduled: IntArray
    drafts: IntArray
    replayed: IntArray
    """Tokens that recurrent states lack."""

    @classmethod
    def of(cls, step: SchedulerOutput) -> "_Rows":
        """Return all requests of a step."""
        none = np.zeros_like(step.rows)
        drafts, replayed = step.num_draft_tokens, step.num_replayed_tokens
        return cls(
            *(step.rows, step.num_computed_tokens, step.num_scheduled_tokens),
            none if drafts is None else drafts,
            none if replayed is None else replayed,
        )

    def part(self, start: int, end: int | None = None) -> "_Rows":
        """Return the entries from `start` up to `end`."""
        return _Rows(*(column[start:end] for column in self))

    def split_at(self, ends: Collection[tuple[int, int]]) -> "_Rows":
        """Divide the tokens of requests at the given (batch index, position) pairs."""
        found: list[tuple[int, int, int, int, int]] = []
        for row, start, count, drafts, replayed in zip(*(x.tolist() for x in self), strict=True):
            inside = sorted(end for of_row, end in ends if of_row == row)
            stops = [end for end in inside if start < end < start + count] + [start + count]
            for stop in stops:
                found.append((row, start, stop - start, drafts, replayed))
                start = stop
        columns = zip(*found, strict=True) if found else ((),) * 5
        return _Rows(*(np.array(column, np.int32) for column in columns))

    def select(self, is_chosen: npt.NDArray[np.bool_]) -> "_Rows":
        """Return some of the entries."""
        return _Rows(*(column[is_chosen] for column in self))


class _Group(NamedTuple):
    """Requests of one forward pass, its bucket, and the sizes that the bucket has to cover."""

    rows: _Rows
    bucket: Bucket
    needed: Sizes


PieceEnd = Callable[[int, int, int], int]
"""Row, index of the first token of a piece, and the index where it should end -> where it ends; see
`ImageAttention.piece_end`."""


class ItemSlotSizes(Protocol):
    """The item slots that requests read by cross-attention.

    Attributes:
        sizes: values of `PaddedShape.item_slots`.
    """

    sizes: tuple[int, ...]

    def slots_of(self, rows: IntArray) -> int:
        """Return the first of `sizes` with enough slots for each of these requests."""
        ...


NeedsPrefill = Callable[[IntArray, IntArray], npt.NDArray[np.bool_] | None]
"""Rows and positions of n single tokens -> [n] bool; see `RowPart.needs_prefill`."""


class HPULaunchPlanner:
    """Plans the forward passes of steps for one runner.

    Args:
        catalog: the buckets; it is read again for every forward pass, so it may still be warming
            up.
        limits: limits of a forward pass; larger batches are split.
        batch: block tables of the requests.
        merged_prompts: most prompts in one sequence of a merged prefill; 0: prompts are not merged.
        has_states: the model has recurrent state, which a forward pass reads as the previous one
            has left it; so it runs only one chunk of a prompt.
        needs_prefill: tells which single tokens must not run as decodes; None: all may.
        piece_end: tells where prompts may be divided; None: anywhere.
        late: shapes that were compiled at their first use.
        item_slots: how much requests read by cross-attention; None: nothing.

    Attributes:
        catalog, limits: the arguments.
    """

    def __init__(
        self,
        catalog: Catalog,
        limits: StepLimits,
        batch: InputBatch,
        merged_prompts: int = 0,
        needs_prefill: NeedsPrefill | None = None,
        *,
        has_states: bool = False,
        piece_end: PieceEnd | None = None,
        late: LateShapes[PaddedShape] | None = None,
        item_slots: ItemSlotSizes | None = None,
    ) -> None:
        self._item_slots = item_slots
        self._piece_end = piece_end
        self.catalog = catalog
        self._late = LateShapes[PaddedShape]() if late is None else late
        self._needs_prefill = needs_prefill
        self.limits = limits
        self._batch = batch
        self._merged_prompts = merged_prompts
        self._has_states = has_states
        self._size = limits.block_size

    def plan(self, step: SchedulerOutput) -> list[Launch]:
        """Split a step into forward passes: decodes, then prefills in the order of the batch.

        A forward pass ends at each token whose recurrent state is kept.
        """
        decodes, prompts = self._separate(_Rows.of(step))
        if step.kept_states is None:
            return [*self._decodes(decodes), *self._prefills(prompts)]
        ends = _kept_ends(step)
        prompts = prompts.split_at(ends.keys())
        launches = [*self._decodes(decodes), *self._prefills(prompts)]
        return [_with_kept(x, ends, step.kept_states) for x in launches]

    def plan_known(
        self, rows: IntArray, computed: IntArray, scheduled: IntArray, *, is_decode: bool
    ) -> list[PaddedLaunch]:
        """Plan forward passes for known tokens that a draft model has not computed.

        Args:
            rows: [n] batch indices.
            computed: [n] position of the first token of each.
            scheduled: [n] tokens of each.
            is_decode: whether the requests fit in a decode of several tokens, like one that
                verifies drafts.
        """
        none = np.zeros_like(rows)
        if is_decode:
            return self._decodes(_Rows(rows, computed, scheduled, scheduled - 1, none))
        return self._prefills(_Rows(rows, computed, scheduled, none, none))

    def _decodes(self, rows: _Rows) -> list[PaddedLaunch]:
        most = self.limits.max_draft_batch
        has_drafts = (rows.drafts > 0) | (rows.replayed > 0)
        if most is None or len(rows.ids) <= most or not has_drafts.any():
            return [self._decode(part) for part in self._split_decodes(rows)]
        parts = self._split_decodes(rows.select(~has_drafts))
        parts += self._split_decodes(rows.select(has_drafts), most)
        return [self._decode(part) for part in parts]

    def _prefills(self, rows: _Rows) -> list[PaddedLaunch]:
        slots = self._slots_of(rows)
        return [
            _launch(group, self._shape(group.bucket, slots))
            for group in self._group_prefills(self._split_prompts(rows))
        ]

    def _slots_of(self, rows: _Rows) -> int:
        """Return `PaddedShape.item_slots` of a forward pass with these requests."""
        return 0 if self._item_slots is None else self._item_slots.slots_of(rows.ids)

    def _separate(self, rows: _Rows) -> tuple[_Rows, _Rows]:
        """Separate decodes from prompts.

        A single token of a prompt runs as a decode, which costs less, unless its request has data
        that only prefills read.
        """
        num_decodes = int(np.count_nonzero(rows.scheduled - rows.drafts == 1))
        is_prompt = None
        if self._needs_prefill is not None:
            is_prompt = self._needs_prefill(rows.ids, rows.computed)
        if is_prompt is None:
            return rows.part(0, num_decodes), rows.part(num_decodes)
        is_prompt[num_decodes:] = True
        return rows.select(~is_prompt), rows.select(is_prompt)

    def plan_prompts(self, step: SchedulerOutput) -> list[Launch]:
        """Plan the forward passes of a step of whole prompts, none of which is split or decoded."""
        rows = _Rows.of(step)
        return [_launch(group, PaddedShape(group.bucket)) for group in self._group_prefills(rows)]

    # ---- decodes --------------------------------------------------------------------------

    def _split_decodes(self, rows: _Rows, max_batch: int | None = None) -> list[_Rows]:
        """Split decodes into groups that fit the largest batch and the largest number of blocks."""
        if not len(rows.ids):
            return []
        limits = self.limits
        max_batch = max_batch or limits.max_decode_batch
        most = limits.max_block_refs
        refs = self._references(rows.computed + rows.scheduled)
        if len(refs) <= max_batch and (most is None or refs.sum() <= most):
            return [rows]
        parts, start, total = [], 0, 0
        for end, count in enumerate(refs.tolist()):
            is_full = end - start == max_batch
            if is_full or (most is not None and total + count > most):
                parts.append(rows.part(start, end))
                start, total = end, 0
            total += count
        return [*parts, rows.part(start)]

    def _references(self, seq_lens: IntArray) -> IntArray:
        """Return the number of blocks of a decode for each sequence."""
        if not self.limits.reads_blocks:
            return np.ones_like(seq_lens)
        return _num_blocks(seq_lens, self._size)

    def _decode(self, rows: _Rows) -> PaddedLaunch:
        batch, seq_lens = len(rows.ids), rows.computed + rows.scheduled
        query_len = int(rows.scheduled.max())
        if self._has_states and (query_len > 1 or rows.replayed.any()):
            # A decode without drafts and replays keeps query_len 1; all others use the one larger
            # size.
            query_len = 1 + self.limits.max_draft_tokens
        if self.limits.contiguous_pa:
            table = self._batch.block_table[rows.ids]
            counts = count_decode_blocks(table, seq_lens, self._size)
        else:
            refs = int(self._references(seq_lens).sum())
            counts = DecodeBlockCounts(references=refs, span=refs, shared=0)
        shape = self._decode_shape(batch, query_len, counts)
        if shape is None:
            own = self._own_shape(Phase.DECODE, batch, query_len, counts.references)
            shape = self._shape(own)
        slots = self._slots_of(rows)
        shape = replace(shape, item_slots=slots)
        if not self.is_compiled(shape):
            warmed = self._decode_shape(batch, query_len, counts, warmed_only=True)
            late = [s for s in self._late if self._holds(s, batch, query_len, counts, slots)]
            if warmed is not None:
                late.insert(0, replace(warmed, item_slots=slots))
            shape = self._instead_of(shape, late)
        blocks = counts.span if shape.is_contiguous else counts.references
        return _launch(_Group(rows, shape.bucket, (batch, query_len, blocks)), shape)

    def _decode_shape(
        self, batch: int, query_len: int, counts: DecodeBlockCounts, *, warmed_only: bool = False
    ) -> PaddedShape | None:
        """Return the cheapest shape of the catalog into which a decode fits; None if there
        is none.
        """

        def fit(blocks: int) -> Bucket | None:
            return self.catalog.fit(Phase.DECODE, batch, query_len, blocks, warmed_only)

        options: list[PaddedShape] = []
        if self.limits.contiguous_pa and (bucket := fit(counts.span)) is not None:
            sliced = _sliced_shapes(bucket, self.limits)
            options += [shape for shape in sliced if counts.shared <= shape.num_shared]
        if (bucket := fit(counts.references)) is not None:
            options.append(self._shape(bucket))
        return min(options, key=lambda shape: shape.read_cost, default=None)

    def _holds(
        self,
        shape: PaddedShape,
        batch: int,
        query_len: int,
        counts: DecodeBlockCounts,
        item_slots: int,
    ) -> bool:
        """Return whether a decode can be padded to this shape."""
        if shape.item_slots not in (0, item_slots):
            return False
        blocks = counts.span if shape.is_contiguous else counts.references
        is_shared = shape.is_contiguous and counts.shared > shape.num_shared
        asked = Bucket(Phase.DECODE, batch, query_len, blocks)
        is_possible = self.limits.contiguous_pa or not shape.is_contiguous
        return is_possible and not is_shared and shape.bucket.covers(asked)

    # ---- prefills -------------------------------------------------------------------------

    def _split_prompts(self, rows: _Rows) -> _Rows:
        """Split prompts that are longer than the longest bucket into chunks.

        Each chunk has the previous ones as context. They may run in one forward pass: all of its
        keys are written before any is read.
        """
        longest = self.limits.max_query_len
        if not len(rows.ids) or rows.scheduled.max() <= longest:
            return rows
        if self._piece_end is not None:
            return rows.split_at(set(self._ends_of_pieces(rows, longest, self._piece_end)))
        counts = _num_blocks(rows.scheduled, longest)
        index = np.repeat(np.arange(len(counts)), counts)
        piece = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        done = (piece * longest).astype(np.int32)
        return _Rows(
            rows.ids[index],
            rows.computed[index] + done,
            np.minimum(rows.scheduled[index] - done, longest).astype(np.int32),
            rows.drafts[index],
            rows.replayed[index],
        )

    @staticmethod
    def _ends_of_pieces(
        rows: _Rows, longest: int, piece_end: PieceEnd
    ) -> Iterator[tuple[int, int]]:
        """Yield (batch index, end position) of each chunk of prompts, except their last ones."""
        columns = (rows.ids.tolist(), rows.computed.tolist(), rows.scheduled.tolist())
        for row, start, count in zip(*columns, strict=True):
            end = start + count
            while end - start > longest:
                start = piece_end(row, start, start + longest)
                yield row, start

    def _group_prefills(self, rows: _Rows) -> list[_Group]:
        """Group neighbouring prompts into forward passes at the lowest total cost.

        The order of the batch is kept; the cost of compiling is included.
        """
        cheapest, slots = self._cheapest_groups(rows), self._slots_of(rows)
        shapes = [self._shape(group.bucket, slots) for group in cheapest]
        new = [shape for shape in shapes if not self.is_compiled(shape)]
        if not new or not self._has_compiled(Phase.PREFILL):
            return cheapest
        groups = self._cheapest_groups(rows, pays_compiling=True)
        lost = _cost_of(groups) - _cost_of(cheapest)
        if lost > 0:
            self._late.note_loss(new, lost)
        return groups

    def _cheapest_groups(self, rows: _Rows, *, pays_compiling: bool = False) -> list[_Group]:
        """Group neighbouring prompts into forward passes at the lowest cost.

        Args:
            rows: rows of prompts.
            pays_compiling: include the cost of compiling.
        """
        ids, scheduled = rows.ids.tolist(), rows.scheduled.tolist()
        if self.limits.reads_blocks:
            contexts = _num_blocks(rows.computed, self._size).tolist()
        else:
            contexts = [0] * len(ids)
        # best[i] is the cheapest division of the first i + 1 rows: its cost, and the start, bucket
        # and sizes of its last launch.
        best: list[tuple[float, int, Bucket, Sizes]] = []
        for end in range(1, len(scheduled) + 1):
            options: list[tuple[float, int, Bucket, Sizes]] = []
            for start, shape in self._groups_before(ids, scheduled[:end], contexts):
                bucket = self.catalog.fit(Phase.PREFILL, *shape)
                if bucket is None:
                    if options:
                        break  # then larger groups have none either
                    bucket = self._own_shape(Phase.PREFILL, *shape)
                price = 0.0
                if pays_compiling:
                    bucket, price = self._padded_prefill(bucket, shape, self._slots_of(rows))
                before = best[start - 1][0] if start else 0
                cost = before + padded_cost(bucket) + PREFILL_LAUNCH_COST + price
                options.append((cost, start, bucket, shape))
            best.append(min(options))
        groups: list[_Group] = []
        end = len(best)
        while end:
            _, start, bucket, sizes = best[end - 1]
            groups.append(_Group(rows.part(start, end), bucket, sizes))
            end = start
        return groups[::-1]

    def _padded_prefill(
        self, bucket: Bucket, asked: tuple[int, int, int], item_slots: int
    ) -> tuple[Bucket, float]:
        """Return the bucket in which a prefill runs, and the cost of compiling it.

        It prefers compiled buckets if they do not cost much more.

        Args:
            bucket: the cheapest one.
            asked: batch, query length and blocks.
            item_slots: slots of the items of the forward pass.
        """
        shape, wanted = self._shape(bucket, item_slots), Bucket(Phase.PREFILL, *asked)
        if self.is_compiled(shape):
            return bucket, 0.0
        late = [s for s in self._late if s.item_slots == item_slots]
        options = [s.bucket for s in late if s.bucket.covers(wanted)]
        warmed = self.catalog.fit(Phase.PREFILL, *asked, warmed_only=True)
        if warmed is not None:
            options.append(warmed)
        price = self._late.price(shape)
        padded = min(options, key=padded_cost, default=None)
        if padded is None or padded_cost(padded) > padded_cost(bucket) + price:
            return bucket, price
        return padded, 0.0

    def _groups_before(
        self, ids: list[int], scheduled: list[int], contexts: list[int]
    ) -> Iterator[tuple[int, Sizes]]:
        """Yield first index and padded sizes of each group that ends with the last request.

        The smallest group comes first.
        """
        longest = tokens = most = blocks = 0
        for start in range(len(scheduled) - 1, -1, -1):
            count = len(scheduled) - start
            if self._has_states and count > 1 and ids[start] == ids[start + 1]:
                return
            longest, tokens = max(longest, scheduled[start]), tokens + scheduled[start]
            most, blocks = max(most, contexts[start]), blocks + contexts[start]
            if not self._merged_prompts:
                yield start, (count, longest, most)
            elif count > self._merged_prompts:
                return
            else:
                yield start, (1, tokens, blocks)

    # ---- buckets --------------------------------------------------------------------------

    def is_compiled(self, shape: PaddedShape) -> bool:
        """Return whether a forward pass of this shape is compiled already."""
        return self.catalog.is_warmed(shape.bucket) or shape in self._late

    def _has_compiled(self, phase: Phase) -> bool:
        """Return whether any shape of a phase is compiled."""
        compiled = (*self.catalog.warmed, *(shape.bucket for shape in self._late))
        return any(bucket.phase is phase for bucket in compiled)

    def _shape(self, bucket: Bucket, item_slots: int = 0) -> PaddedShape:
        """Return the shape of a prefill, or of a decode that gathers its blocks."""
        if bucket.phase is Phase.PREFILL:
            return PaddedShape(bucket, merged_prompts=self._merged_prompts, item_slots=item_slots)
        return PaddedShape(bucket, item_slots=item_slots)

    def _instead_of(self, shape: PaddedShape, compiled: Iterable[PaddedShape]) -> PaddedShape:
        """Return the cheapest of the compiled shapes, or `shape` if compiling it costs less."""
        padded = min(compiled, key=lambda each: each.cost, default=None)
        if padded is None or padded.cost > shape.cost + self._late.price(shape):
            return shape
        self._late.note_loss([shape], max(0, padded.cost - shape.cost))
        return padded

    def _own_shape(self, phase: Phase, batch: int, query_len: int, blocks: int) -> Bucket:
        """Return the bucket for a batch that fits no bucket of the catalog: its own padded
        sizes.
        """
        padded = query_len if phase is Phase.DECODE else round_up(query_len, self._size)
        return Bucket(phase, batch, padded, blocks)


def _launch(group: _Group, shape: PaddedShape) -> PaddedLaunch:
    rows = group.rows
    return PaddedLaunch(
        rows.ids,
        rows.computed,
        rows.scheduled,
        shape.bucket,
        shape.is_contiguous,
        shape.merged_prompts,
        shape.num_shared,
        shape.item_slots,
        group.needed,
        num_drafts=rows.drafts if rows.drafts.any() else None,
        num_replayed_tokens=rows.replayed if rows.replayed.any() else None,
    )


def _kept_ends(step: SchedulerOutput) -> dict[tuple[int, int], list[int]]:
    """Return (batch index, position) -> indices of kept states to which the state is
    copied there.
    """
    assert step.kept_states is not None
    computed = dict(zip(step.rows.tolist(), step.num_computed_tokens.tolist(), strict=True))
    ends: dict[tuple[int, int], list[int]] = {}
    for row, count, number in step.kept_states.tolist():
        ends.setdefault((row, computed[row] + count), []).append(number)
    return ends


def _with_kept(
    launch: PaddedLaunch, ends: dict[tuple[int, int], list[int]], of_step: IntArray
) -> PaddedLaunch:
    """Add to a forward pass which recurrent states are kept after it, and return it.

    A state is kept after the last token that the forward pass runs for a request, or after one of
    the tokens that it replays.

    Args:
        launch: one forward pass of the step.
        ends: positions at which the step keeps states, from `_kept_ends`.
        of_step: all states that the step keeps: `SchedulerOutput.kept_states`.
    """
    if launch.num_replayed_tokens is not None:
        is_replayed = (of_step[:, 1] <= 0) & np.isin(of_step[:, 0], launch.rows)
        assert len(set(of_step[is_replayed, 0].tolist())) == is_replayed.sum()
        launch = replace(launch, kept_replays=of_step[is_replayed])
    columns = (launch.rows, launch.num_computed_tokens, launch.num_scheduled_tokens)
    kept = [
        (row, count, number)
        for row, start, count in zip(*(x.tolist() for x in columns), strict=True)
        for number in ends.get((row, start + count), ())
    ]
    return replace(launch, kept_states=np.array(kept, np.int32)) if kept else launch


def _cost_of(groups: list[_Group]) -> int:
    return sum(padded_cost(group.bucket) + PREFILL_LAUNCH_COST for group in groups)


def _num_blocks(num_tokens: IntArray, block_size: int) -> IntArray:
    return -(-num_tokens // block_size)
