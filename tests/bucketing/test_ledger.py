import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import GIB, MIB
from vllm.bucketing.ledger import (
    MemoryClass,
    MemoryLedger,
    format_bytes,
    open_ledger,
    split_graph_memory,
    split_memory,
)
from vllm.bucketing.log_lines import (
    graph_memory_line,
    memory_split_line,
    num_blocks_line,
    warmup_finished_line,
)
from vllm.kv_cache_spec import CacheKind, CacheTensor, KVCacheSpec, plan_layout

# The logs of the seeds have rounded numbers. When these exact numbers are rounded, the same lines
# come out.
CARD = int(94.6216 * GIB)
USED_2024_09 = int(15.3969 * GIB)
USED_2024_08 = int(15.4656 * GIB)
_LAYER = KVCacheSpec(CacheKind.FULL, (CacheTensor((8, 128), "bfloat16", 2),) * 2)
LLAMA_8B_BLOCK = plan_layout([_LAYER] * 32, block_size=128, max_model_len=8192).block_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1024, "1024 B"),
        (1025, "1.001 KiB"),
        (65536, "64 KiB"),
        (-258048, "-252 KiB"),
        (1 << 20, "1024 KiB"),
        (-3637248, "-3.469 MiB"),
        (71011123, "67.72 MiB"),
        (92.77 * MIB, "92.77 MiB"),
        (355 * MIB, "355 MiB"),
        (GIB, "1024 MiB"),
        (1.067 * GIB, "1.067 GiB"),
        (7.13 * GIB, "7.13 GiB"),
        (71.3 * GIB, "71.3 GiB"),
        (16160038912, "15.05 GiB"),
        (108.2 * GIB, "108.2 GiB"),
        (1007 * GIB, "1007 GiB"),
        (2048 * GIB, "2 TiB"),
    ],
)
def test_bytes_are_printed_as_the_seeds_print_them(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_a_block_of_llama_8b_is_16_mib():
    assert LLAMA_8B_BLOCK == 16 * MIB


def test_the_first_seed_has_4107_blocks():
    free = CARD - USED_2024_09
    assert (format_bytes(CARD), format_bytes(USED_2024_09)) == ("94.62 GiB", "15.4 GiB")
    split = split_memory(free, 0.9, 0.1)
    assert memory_split_line(split, 0.9, 0.1) == (
        "Free device memory: 79.22 GiB, 71.3 GiB usable (gpu_memory_utilization=0.9), 7.13 GiB "
        "reserved for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.1), 64.17 GiB reserved for KV cache"
    )
    line = num_blocks_line(split.num_blocks(LLAMA_8B_BLOCK))
    assert line == "# HPU blocks: 4107, # CPU blocks: 0"


def test_the_second_seed_has_1519_blocks():
    split = split_memory(CARD - USED_2024_08, 0.5, 0.4)
    assert memory_split_line(split, 0.5, 0.4) == (
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), 15.83 GiB "
        "reserved for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), 23.75 GiB reserved for KV cache"
    )
    num_blocks = split.num_blocks(LLAMA_8B_BLOCK)
    assert num_blocks_line(num_blocks) == "# HPU blocks: 1519, # CPU blocks: 0"
    assert format_bytes(num_blocks * LLAMA_8B_BLOCK) == "23.73 GiB"


def test_graph_memory_is_what_is_free_less_the_margin():
    margin = split_memory(CARD - USED_2024_08, 0.5, 0.4).margin_bytes
    graphs = int(55.43 * GIB) - margin
    assert format_bytes(graphs) == "15.85 GiB"
    prompt, decode = split_graph_memory(int(15.85 * GIB), 0.3)
    assert prompt / GIB == pytest.approx(4.755)
    assert decode / GIB == pytest.approx(11.095)
    assert prompt + decode == int(15.85 * GIB)
    # The log of the seed has 11.095 GiB here: five digits, where all other numbers have four.
    line = graph_memory_line(graphs, int(55.43 * GIB), prompt, decode, 0.3)
    assert line == (
        "Using 15.85 GiB/55.43 GiB of free device memory for HPUGraphs, 4.755 GiB for prompt and "
        "11.09 GiB for decode (VLLM_GRAPH_PROMPT_RATIO=0.3)"
    )


def test_the_last_line_of_the_warmup_is_the_seeds():
    assert warmup_finished_line(31.6, int(92.77 * MIB)) == (
        "Warmup finished in 32 secs, allocated 92.77 MiB of device memory"
    )


def test_a_class_cannot_exceed_its_budget():
    ledger = MemoryLedger(100)
    ledger.assign(MemoryClass.KV_CACHE, 60)
    assert ledger.book(MemoryClass.KV_CACHE, 60)
    assert not ledger.book(MemoryClass.KV_CACHE, 1)
    assert ledger.booked(MemoryClass.KV_CACHE) == 60
    assert not ledger.book(MemoryClass.DECODE_GRAPHS, 1)
    ledger.release(MemoryClass.KV_CACHE, 10)
    assert ledger.left(MemoryClass.KV_CACHE) == 10


def test_budgets_cannot_exceed_the_device_or_drop_below_what_is_booked():
    ledger = MemoryLedger(100)
    ledger.assign(MemoryClass.WEIGHTS, 70)
    ledger.book(MemoryClass.WEIGHTS, 50)
    with pytest.raises(
        ValueError, match=r"at least 0 B .* and at most 30 B .*, got .*; there are 100 B"
    ):
        ledger.assign(MemoryClass.KV_CACHE, 31)
    with pytest.raises(ValueError, match=r"at least 50 B \(in use now\)"):
        ledger.assign(MemoryClass.WEIGHTS, 49)
    with pytest.raises(ValueError, match="21 B from weights: only 20 B are left"):
        ledger.move(MemoryClass.WEIGHTS, MemoryClass.KV_CACHE, 21)
    with pytest.raises(ValueError, match="51 B of weights: only 50 B are in use"):
        ledger.release(MemoryClass.WEIGHTS, 51)
    with pytest.raises(ValueError, match="must not be negative"):
        ledger.book(MemoryClass.WEIGHTS, -1)
    with pytest.raises(ValueError, match="must be fractions from 0 to 1"):
        split_memory(100, 1.1, 0.1)
    with pytest.raises(ValueError, match="prompt_ratio must be a fraction from 0 to 1"):
        split_graph_memory(100, -0.1)


def test_an_opened_ledger_adds_up_to_the_card():
    workspace = int(0.35 * GIB)
    split = split_memory(CARD - USED_2024_09, 0.9, 0.1)
    ledger = open_ledger(
        total_bytes=CARD,
        weight_bytes=USED_2024_09 - workspace,
        workspace_bytes=workspace,
        split=split,
        prompt_ratio=0.3,
        block_bytes=LLAMA_8B_BLOCK,
    )
    assert ledger.budget(MemoryClass.KV_CACHE) == 4107 * LLAMA_8B_BLOCK
    assert 0 <= ledger.unassigned_bytes < LLAMA_8B_BLOCK
    assert sum(ledger.budget(c) for c in MemoryClass) + ledger.unassigned_bytes == CARD
    assert sum(ledger.booked(c) for c in MemoryClass) == USED_2024_09 + split.margin_bytes
    graphs = ledger.budget(MemoryClass.PREFILL_GRAPHS) + ledger.budget(MemoryClass.DECODE_GRAPHS)
    assert graphs == split.graph_bytes


@given(st.integers(0, 1 << 40), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_no_byte_is_lost_in_a_split(free, utilization, reserved, ratio):
    split = split_memory(free, utilization, reserved)
    assert split.usable_bytes + split.margin_bytes == free
    assert split.graph_bytes + split.kv_bytes == split.usable_bytes
    assert sum(split_graph_memory(split.graph_bytes, ratio)) == split.graph_bytes
    assert min(split.usable_bytes, split.margin_bytes, split.graph_bytes, split.kv_bytes) >= 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["assign", "move", "book", "release"]),
            st.sampled_from(MemoryClass),
            st.sampled_from(MemoryClass),
            st.integers(0, 60),
        ),
        max_size=40,
    )
)
@settings(max_examples=100, deadline=None)
def test_whatever_is_done_the_ledger_balances(operations):
    ledger = MemoryLedger(100)
    for name, cls, other, num_bytes in operations:
        before = {c: (ledger.budget(c), ledger.booked(c)) for c in MemoryClass}
        try:
            if name == "move":
                ledger.move(cls, other, num_bytes)
            elif getattr(ledger, name)(cls, num_bytes) is False:
                assert {c: (ledger.budget(c), ledger.booked(c)) for c in MemoryClass} == before
        except ValueError:
            assert {c: (ledger.budget(c), ledger.booked(c)) for c in MemoryClass} == before
        assert all(0 <= ledger.booked(c) <= ledger.budget(c) for c in MemoryClass)
        assert sum(ledger.budget(c) for c in MemoryClass) + ledger.unassigned_bytes == 100
        assert ledger.unassigned_bytes >= 0
