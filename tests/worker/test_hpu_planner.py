"""Test how a step is split, joined and padded, forward pass by forward pass."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.bucketing.helpers import make_limits
from tests.worker.hpu_helpers import Rows, entries
from vllm.bucketing import Phase
from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.catalog.catalog import Catalog
from vllm.messages import IntArray, MediaItem, SchedulerOutput
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.hpu.launches.planner import (
    HPULaunchPlanner,
    ItemSlotSizes,
    PaddedLaunch,
    PaddedShape,
    PieceEnd,
    launch_shapes,
)
from vllm.worker.parts.image_attention import ImageAttention

SIZE = 16


def plan(
    rows: Rows,
    buckets: list[Bucket] | Catalog,
    tables: dict[int, list[int]] | None = None,
    merged_prompts: int = 0,
    *,
    has_states: bool = False,
    piece_end: PieceEnd | None = None,
    kept: list[tuple[int, int, int]] | None = None,
    item_slots: ItemSlotSizes | None = None,
    **limits: Any,
) -> list[PaddedLaunch]:
    """Plan the forward passes of a step.

    Args:
        rows: (batch index, computed tokens, scheduled tokens) of each request.
        buckets: available buckets.
        tables: block ids by batch index; only contiguous attention reads them.
        merged_prompts, has_states, piece_end, item_slots: see HPULaunchPlanner.
        kept: see `SchedulerOutput.kept_states`.
        limits: limits of a forward pass.
    """
    defaults = {"block_size": SIZE, "max_num_seqs": 8, "enable_chunked_prefill": True}
    batch = InputBatch(max_num_seqs=8, max_model_len=2048, max_blocks=128)
    for row, blocks in (tables or {}).items():
        batch.block_table[row, : len(blocks)] = blocks
    if isinstance(buckets, list):
        buckets = Catalog(
            [bucket for bucket in buckets if bucket.phase is Phase.PREFILL],
            [bucket for bucket in buckets if bucket.phase is Phase.DECODE],
        )
    planner = HPULaunchPlanner(
        buckets,
        make_limits(**{**defaults, **limits}),
        batch,
        merged_prompts,
        has_states=has_states,
        piece_end=piece_end,
        item_slots=item_slots,
    )
    columns = [np.array(column, np.int32) for column in zip(*rows, strict=True)]
    step = make_step(*columns)
    if kept is not None:
        step = replace(step, kept_states=np.array(kept, np.int32))
    launches: Any = planner.plan(step)
    return launches


def make_step(rows: IntArray, computed: IntArray, scheduled: IntArray) -> SchedulerOutput:
    none = np.empty(0, np.int32)
    return SchedulerOutput(
        step_id=0,
        freed_rows=[],
        new_requests=[],
        rows=rows,
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        block_rows=none,
        block_ids=none,
    )


def shown(launches: list[PaddedLaunch]) -> list[tuple[Rows, Bucket]]:
    return [(entries([launch]), launch.bucket) for launch in launches]


def test_decodes_run_first_and_prompts_follow_in_their_order():
    rows = [(3, 20, 1), (0, 16, 1), (5, 0, 90), (1, 32, 10)]
    buckets = [decode(2, 8), prefill(1, 16, 2), prefill(1, 128)]
    assert shown(plan(rows, buckets)) == [
        ([(3, 20, 1), (0, 16, 1)], decode(2, 8)),
        ([(5, 0, 90)], prefill(1, 128)),
        ([(1, 32, 10)], prefill(1, 16, 2)),
    ]


def test_rows_with_drafts_run_with_the_decodes_in_one_launch():
    columns = [np.array(c, np.int32) for c in ([3, 0, 5, 1], [20, 15, 30, 0], [1, 3, 2, 9])]
    batch = InputBatch(max_num_seqs=8, max_model_len=2048, max_blocks=128)
    catalog = Catalog([prefill(1, 16)], [decode(4, 8), decode(4, 8, 4), decode(4, 8, 8)])
    kinds = {"block_size": SIZE, "max_num_seqs": 8, "enable_chunked_prefill": True}
    limits = make_limits(**kinds)
    step = replace(make_step(*columns), num_draft_tokens=np.array([0, 2, 1, 0], np.int32))
    launches: Any = HPULaunchPlanner(catalog, limits, batch).plan(step)
    assert shown(launches) == [
        ([(3, 20, 1), (0, 15, 3), (5, 30, 2)], decode(4, 8, 4)),
        ([(1, 0, 9)], prefill(1, 16)),
    ]
    assert launches[0].num_drafts.tolist() == [0, 2, 1]
    assert launches[1].num_drafts is None

    limits = make_limits(**kinds, max_draft_tokens=3, max_draft_batch=2)
    launches = HPULaunchPlanner(catalog, limits, batch).plan(step)
    assert shown(launches[:2]) == [
        ([(3, 20, 1)], decode(4, 8)),
        ([(0, 15, 3), (5, 30, 2)], decode(4, 8, 4)),
    ]


def test_rows_that_replay_tokens_run_in_the_bucket_of_drafts():
    columns = [np.array(c, np.int32) for c in ([3, 0], [20, 15], [1, 1])]
    batch = InputBatch(max_num_seqs=8, max_model_len=2048, max_blocks=128)
    catalog = Catalog([prefill(1, 16)], [decode(4, 8), decode(4, 8, 4)])
    limits = make_limits(
        block_size=SIZE, max_num_seqs=8, enable_chunked_prefill=True, max_draft_tokens=3
    )
    step = replace(
        make_step(*columns),
        num_replayed_tokens=np.array([0, 2], np.int32),
        kept_states=np.array([[0, -1, 9], [3, 1, 10]], np.int32),
    )
    (launch,) = HPULaunchPlanner(catalog, limits, batch, has_states=True).plan(step)
    assert launch.bucket == decode(4, 8, 4)
    assert launch.num_replayed_tokens.tolist() == [0, 2]
    assert launch.kept_replays.tolist() == [[0, -1, 9]]
    assert launch.kept_states.tolist() == [[3, 1, 10]]


# ---- decodes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "limits", "parts"),
    [
        ([2, 2, 2], {"max_block_refs": 128}, [3]),
        ([2, 2, 2], {"max_block_refs": 6, "max_model_len": 64}, [3]),
        ([2, 2, 2], {"max_block_refs": 5, "max_model_len": 64}, [2, 1]),
        ([4, 1, 1, 4, 4], {"max_block_refs": 6, "max_model_len": 64}, [3, 1, 1]),
        ([1, 4, 1, 1], {"max_block_refs": 4, "max_model_len": 64}, [1, 1, 2]),
        ([1, 1, 1, 1, 1], {"max_num_seqs": 2}, [2, 2, 1]),
        # The cache has 3 usable blocks, so at most 3 requests decode together.
        ([1, 1, 1, 1], {"num_blocks": 4, "max_model_len": 32}, [3, 1]),
    ],
)
def test_decodes_are_split_where_a_launch_is_full(num_blocks, limits, parts):
    rows = [(row, count * SIZE - 1, 1) for row, count in enumerate(num_blocks)]
    launches = plan(rows, [decode(8, 128)], **limits)
    assert [len(launch.rows) for launch in launches] == parts
    assert entries(launches) == rows


@pytest.mark.parametrize(
    ("tables", "is_contiguous", "bucket"),
    [
        # The highest block id decides the size of the slice. A slice of 16 blocks costs more than a
        # gather of 8.
        ({0: [3, 7], 1: [2]}, True, decode(2, 8)),
        ({0: [3, 8], 1: [2]}, True, decode(2, 16)),
        ({0: [3, 16], 1: [2]}, False, decode(2, 8)),
        # Each further reference to a block is a repeat. The shape has room for two repeats; with a
        # third one, the blocks are gathered.
        ({0: [5, 6, 1], 1: [5, 6, 2]}, True, decode(2, 8)),
        ({0: [5, 6, 7, 1], 1: [5, 6, 7, 2]}, False, decode(2, 8)),
        ({0: [5, 6, 7, 1, 3], 1: [5, 6, 7, 2, 4]}, False, decode(2, 16)),
        # No cache has enough blocks for this slice.
        ({0: [3, 17], 1: [2]}, False, decode(2, 8)),
    ],
)
def test_a_contiguous_decode_is_a_slice_where_it_can_be(tables, is_contiguous, bucket):
    rows = [(row, len(blocks) * SIZE - 1, 1) for row, blocks in tables.items()]
    buckets = [decode(2, 8), decode(2, 16), decode(2, 24)]
    limits = {"contiguous_pa": True, "num_blocks": 18, "enable_prefix_caching": True}
    (launch,) = plan(rows, buckets, tables, **limits)
    assert (launch.is_contiguous, launch.bucket) == (is_contiguous, bucket)


@pytest.mark.parametrize("buckets", [[decode(2, 8), decode(2, 24)], [decode(2, 8)]])
def test_without_sharing_a_slice_beyond_the_buckets_of_the_cache_becomes_a_gather(buckets):
    limits = {"contiguous_pa": True, "num_blocks": 18}
    tables = {0: [3, 17], 1: [2]}
    rows = [(0, 31, 1), (1, 15, 1)]
    (launch,) = plan(rows, buckets, tables, **limits)
    assert launch.shape == PaddedShape(decode(2, 8))
    assert launch.shape in launch_shapes(launch.bucket, make_limits(**limits))


@pytest.mark.parametrize(
    ("bucket", "limits", "kinds"),
    [
        (prefill(1, 128), {"contiguous_pa": True}, [False]),
        (decode(4, 8), {}, [False]),
        (decode(4, 8), {"contiguous_pa": True, "num_blocks": 8}, [True]),
        (decode(4, 8), {"contiguous_pa": True, "num_blocks": 9}, [True, False]),
        (decode(4, 9), {"contiguous_pa": True, "num_blocks": 8}, [False]),
        (decode(4, 9), {"contiguous_pa": True}, [True, False]),
        (
            decode(4, 8),
            {"contiguous_pa": True, "num_blocks": 8, "enable_prefix_caching": True},
            [True, True, False],
        ),
        (
            decode(4, 9),
            {"contiguous_pa": True, "num_blocks": 8, "enable_prefix_caching": True},
            [False],
        ),
    ],
)
def test_a_bucket_is_warmed_up_in_every_shape_it_is_launched_in(bucket, limits, kinds):
    shapes = launch_shapes(bucket, make_limits(**limits))
    assert [(shape.bucket, shape.is_contiguous) for shape in shapes] == [
        (bucket, kind) for kind in kinds
    ]


def test_a_second_slice_has_an_entry_for_each_row_where_blocks_can_be_shared():
    for shares in (False, True):
        limits = make_limits(contiguous_pa=True, enable_prefix_caching=shares)
        shapes = [s for s in launch_shapes(decode(4, 8), limits) if s.is_contiguous]
        assert [(shape.num_shared, shape.num_entries) for shape in shapes] == [
            (0, 8),
            (4, 12),
        ][: 1 + shares]


@pytest.mark.parametrize(
    ("first", "highest", "shape"),
    [
        (3, 7, PaddedShape(decode(2, 8), is_contiguous=True)),
        (4, 7, PaddedShape(decode(2, 8), is_contiguous=True, num_shared=2)),
        # a slice of 16 blocks costs as much as a gather of 8
        (3, 15, PaddedShape(decode(2, 16), is_contiguous=True)),
        (4, 15, PaddedShape(decode(2, 8))),  # a slice of 16 blocks with 2 repeats would cost more
        (3, 16, PaddedShape(decode(2, 8))),
    ],
)
def test_with_prefix_caching_a_decode_takes_what_costs_less(first, highest, shape):
    limits = {"contiguous_pa": True, "num_blocks": 32, "enable_prefix_caching": True}
    tables = {0: [first, 2, 1], 1: [highest, 4, 5]}
    rows = [(row, 3 * SIZE - 1, 1) for row in tables]
    (launch,) = plan(rows, [decode(2, 8), decode(2, 16), decode(2, 24)], tables, **limits)
    assert launch.shape == shape
    assert launch.shape in launch_shapes(launch.bucket, make_limits(**limits))


def test_a_slice_that_never_costs_less_is_not_warmed_up():
    limits = make_limits(contiguous_pa=True, enable_prefix_caching=True, max_model_len=4 * 128)
    assert [len(launch_shapes(decode(1, blocks), limits)) for blocks in (6, 7, 9)] == [3, 2, 1]


# ---- prompts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [
        ([(0, 0, 32)], [(0, 0, 32)]),
        ([(0, 0, 33)], [(0, 0, 32), (0, 32, 1)]),
        ([(0, 5, 70)], [(0, 5, 32), (0, 37, 32), (0, 69, 6)]),
        ([(0, 0, 8), (1, 16, 64)], [(0, 0, 8), (1, 16, 32), (1, 48, 32)]),
        ([(2, 0, 40), (1, 0, 40)], [(2, 0, 32), (2, 32, 8), (1, 0, 32), (1, 32, 8)]),
    ],
)
def test_a_prompt_longer_than_a_launch_may_be_runs_in_pieces(rows, pieces):
    launches = plan(rows, [prefill(1, 32, 8)], max_chunk_tokens=32)
    assert shown(launches) == [([piece], prefill(1, 32, 8)) for piece in pieces]


@pytest.mark.parametrize(
    ("images", "rows", "pieces"),
    [
        ([], [(0, 0, 70)], [(0, 0, 32), (0, 32, 32), (0, 64, 6)]),
        # One chunk ends at the beginning of an image, and another one after an image.
        ([(0, 32), (40, 24)], [(0, 0, 70)], [(0, 0, 32), (0, 32, 32), (0, 64, 6)]),
        ([(30, 20)], [(0, 0, 70)], [(0, 0, 30), (0, 30, 32), (0, 62, 8)]),
        ([(10, 20), (31, 30)], [(0, 0, 70)], [(0, 0, 31), (0, 31, 32), (0, 63, 7)]),
        # The chunk begins inside of an image.
        ([(10, 40), (60, 9)], [(0, 20, 60)], [(0, 20, 32), (0, 52, 28)]),
    ],
)
def test_pieces_of_a_prompt_divide_no_image(images, rows, pieces):
    image_attention = ImageAttention(8)
    image_attention.add(with_images(0, images))
    launches = plan(
        rows, [prefill(1, 32, 8)], max_chunk_tokens=32, piece_end=image_attention.piece_end
    )
    assert shown(launches) == [([piece], prefill(1, 32, 8)) for piece in pieces]


def test_an_image_that_is_longer_than_a_launch_may_be_runs_in_its_own_shape():
    image_attention = ImageAttention(8)
    image_attention.add(with_images(0, [(5, 40)]))
    rows = [(0, 0, 60)]
    launches = plan(
        rows, [prefill(1, 32, 8)], max_chunk_tokens=32, piece_end=image_attention.piece_end
    )
    assert [entries([launch]) for launch in launches] == [[(0, 0, 5)], [(0, 5, 40)], [(0, 45, 15)]]
    assert launches[1].bucket.query_len == 48


def with_images(row: int, runs: list[tuple[int, int]]) -> Any:
    """Return a request with images at these tokens, as (first token, number of tokens)."""
    items = [MediaItem(modality="image", key="", runs=(run,), tensors=()) for run in runs]
    return SimpleNamespace(row=row, request=SimpleNamespace(media=items))


def test_pieces_of_one_prompt_may_share_a_launch():
    (launch,) = plan([(0, 0, 64)], [prefill(1, 32, 2), prefill(2, 32, 2)], max_chunk_tokens=32)
    assert shown([launch]) == [([(0, 0, 32), (0, 32, 32)], prefill(2, 32, 2))]


def test_pieces_of_one_prompt_with_a_state_run_one_after_the_other():
    rows, buckets = [(0, 0, 64), (1, 0, 32)], [prefill(b, 32, 2) for b in (1, 2)]
    launches = plan(rows, buckets, max_chunk_tokens=32, has_states=True)
    assert [entries([launch]) for launch in launches] == [
        [(0, 0, 32)],
        [(0, 32, 32), (1, 0, 32)],
    ]


def test_a_launch_ends_where_a_recurrent_state_is_kept():
    rows = [(0, 15, 1), (1, 7, 1), (2, 0, 70), (3, 32, 20)]
    kept = [(0, 1, 8), (2, 16, 9), (2, 64, 10), (3, 20, 11)]
    buckets = [decode(4, 1, 8), *(prefill(b, 48, 4) for b in (1, 2))]
    launches = plan(rows, buckets, max_chunk_tokens=48, has_states=True, kept=kept)
    assert [entries([launch]) for launch in launches] == [
        [(0, 15, 1), (1, 7, 1)],
        [(2, 0, 16)],
        [(2, 16, 48)],
        [(2, 64, 6), (3, 32, 20)],
    ]
    assert [x.kept_states.tolist() for x in launches] == [
        [[0, 1, 8]],
        [[2, 16, 9]],
        [[2, 48, 10]],
        [[3, 20, 11]],
    ]
    (launch,) = plan(rows[:2], buckets, kept=[(1, 1, 8)])
    assert launch.kept_states.tolist() == [[1, 1, 8]]


SIZES = [prefill(b, q, c) for b in (1, 2, 4) for q in (16, 20, 48, 256) for c in (0, 4, 64)]


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        ([(0, 0, 16), (1, 0, 16)], [2]),
        ([(0, 0, 256), (1, 0, 256), (2, 0, 200), (3, 0, 256)], [4]),
        # Together, both prompts are padded to 48: 28 tokens more than 20 + 48. A further forward
        # pass costs as much as 32 tokens.
        ([(0, 0, 20), (1, 0, 48)], [2]),
        # Together, both prompts are padded to 48: 32 tokens more, and these attend to more keys.
        ([(0, 0, 16), (1, 0, 48)], [1, 1]),
        # Together, both prompts are padded to 256: 240 tokens more.
        ([(0, 0, 16), (1, 0, 256)], [1, 1]),
        # Only neighbors run together: a later prompt may read what an earlier one writes.
        ([(0, 0, 16), (1, 0, 256), (2, 0, 16)], [1, 1, 1]),
        ([(0, 0, 16), (1, 0, 16), (2, 0, 256), (3, 0, 250)], [2, 2]),
        # A third prompt makes a batch of four: 16 tokens more than two forward passes.
        ([(0, 0, 16), (1, 0, 16), (2, 0, 16)], [3]),
        # Context is padded too: both would have 64 blocks, although one has no context.
        ([(0, 0, 256), (1, 1024, 256)], [1, 1]),
        ([(0, 0, 16), (1, 64, 16)], [2]),
        # A batch has at most four prompts.
        ([(row, 0, 16) for row in range(6)], [2, 4]),
    ],
)
def test_neighbours_share_a_launch_where_that_is_cheaper(rows, groups):
    launches = plan(rows, SIZES)
    assert [len(launch.rows) for launch in launches] == groups
    assert entries(launches) == rows


def test_a_group_has_the_largest_sizes_of_its_rows():
    (launch,) = plan([(0, 0, 20), (1, 49, 16)], SIZES)
    assert launch.bucket == prefill(2, 20, 4)


@pytest.mark.parametrize(
    ("rows", "merged_prompts", "expected"),
    [
        # Lengths and contexts of merged prompts are added.
        ([(0, 0, 20), (1, 17, 20)], 3, [(2, prefill(1, 48, 4))]),
        ([(0, 0, 20), (1, 16, 20), (2, 48, 8)], 3, [(3, prefill(1, 48, 4))]),
        ([(0, 0, 20), (1, 0, 20), (2, 0, 8)], 2, [(2, prefill(1, 48)), (1, prefill(1, 16))]),
        # One and four blocks of context are five in all, which still costs less than two forward
        # passes.
        ([(0, 16, 20), (1, 64, 20)], 3, [(2, prefill(1, 48, 64))]),
        # No bucket is large enough for 258 tokens.
        ([(0, 0, 256), (1, 0, 2)], 3, [(1, prefill(1, 256)), (1, prefill(1, 16))]),
    ],
)
def test_merged_prompts_have_one_row_for_all(rows, merged_prompts, expected):
    launches = plan(rows, SIZES, merged_prompts=merged_prompts)
    assert [(len(launch.rows), launch.bucket) for launch in launches] == expected
    assert all(launch.shape.num_rows == merged_prompts for launch in launches)
    assert entries(launches) == rows


# ---- buckets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmed", "expected"),
    [
        ([], decode(1, 1)),
        ([decode(4, 8)], decode(4, 8)),
        ([decode(4, 8), decode(2, 4)], decode(2, 4)),
        ([decode(4, 8), decode(1, 1)], decode(1, 1)),
    ],
)
def test_a_warmed_bucket_is_preferred_to_a_smaller_one(warmed, expected):
    catalog = Catalog([], [decode(1, 1), decode(2, 4), decode(4, 8)])
    catalog.mark_warmed(warmed)
    (launch,) = plan([(0, 0, 1)], catalog)
    assert launch.bucket == expected


@pytest.mark.parametrize(
    ("rows", "buckets", "expected"),
    [
        ([(0, 40, 1), (1, 9, 1)], [], [decode(2, 4)]),
        ([(0, 0, 10)], [], [prefill(1, 16)]),
        ([(0, 33, 17), (1, 0, 5)], [], [prefill(1, 32, 3), prefill(1, 16)]),
        (
            [(0, 0, 16), (1, 0, 300), (2, 0, 16), (3, 0, 16)],
            SIZES,
            [prefill(1, 16), prefill(1, 304), prefill(2, 16)],
        ),
    ],
)
def test_a_launch_without_a_bucket_has_its_own_shape_in_whole_blocks(rows, buckets, expected):
    launches = plan(rows, buckets)
    assert [launch.bucket for launch in launches] == expected
    assert entries(launches) == rows


def test_a_batch_reads_as_many_slots_of_items_as_one_of_its_rows_needs():
    needed = {0: 128, 1: 128, 2: 0}  # a shape with 0 slots has the most

    class Slots:
        sizes = (128, 0)

        def slots_of(self, rows: IntArray) -> int:
            return min(needed[row] for row in rows.tolist())

    buckets = [prefill(2, 16), decode(2, 8)]
    for rows, expected in (
        ([(0, 5, 1), (1, 0, 8)], [128, 128]),
        ([(0, 5, 1), (2, 0, 8)], [128, 0]),
        ([(1, 5, 1), (2, 5, 1), (0, 0, 8)], [0, 128]),
    ):
        launches = plan(rows, buckets, item_slots=Slots())
        assert [launch.shape.item_slots for launch in launches] == expected
    limits = make_limits(block_size=SIZE, max_num_seqs=8, enable_chunked_prefill=True)
    for bucket in buckets:
        shapes = launch_shapes(bucket, limits, item_sizes=Slots.sizes)
        assert [shape.item_slots for shape in shapes] == [128, 0]
