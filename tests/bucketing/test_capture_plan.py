import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import GIB, MIB, SEED_DECODES, SEED_PROMPTS
from vllm.bucketing.bucket import Bucket, Phase, decode, prefill
from vllm.bucketing.catalog.capture_plan import (
    Capture,
    CaptureStep,
    PhaseGraphs,
    capture_graphs,
    capture_order,
)
from vllm.bucketing.ledger import MemoryClass, MemoryLedger, split_graph_memory
from vllm.bucketing.log_lines import captured_line
from vllm.errors import ConfigError

# The log of the seed shows 55.43 - 47.51 GiB for the prompt graphs of 5632 tokens. Prompts that
# come after the decodes need as much for each token. The 48 decode graphs of the seed need 161.9
# MiB.
SEED_BYTES_PER_TOKEN = int((55.43 - 47.51) * GIB / 5632)
SEED_BYTES_PER_DECODE = int(161.9 * MIB / 48)
SEED_GRAPH_BYTES = int(15.85 * GIB)


class FakeDevice:
    """Takes memory for graphs by a formula, and records the graphs that it was asked to capture."""

    def __init__(self, bytes_of) -> None:
        self.bytes_of = bytes_of
        self.steps: list[CaptureStep] = []
        self.held: dict[Bucket, int] = {}
        self.peak = 0

    def capture(self, step: CaptureStep) -> int:
        assert step.bucket not in self.held, "captured twice"
        self.steps.append(step)
        self.held[step.bucket] = self.bytes_of(step.bucket)
        return self.held[step.bucket]

    def release(self, bucket: Bucket) -> None:
        del self.held[bucket]


def make_ledger(prompt_bytes: int, decode_bytes: int) -> MemoryLedger:
    ledger = MemoryLedger(prompt_bytes + decode_bytes)
    ledger.assign(MemoryClass.PREFILL_GRAPHS, prompt_bytes)
    ledger.assign(MemoryClass.DECODE_GRAPHS, decode_bytes)
    return ledger


def run(
    prompts: list[Bucket], decodes: list[Bucket], pools: tuple[int, int], bytes_of, estimate=None
) -> tuple[dict[Phase, PhaseGraphs], FakeDevice, MemoryLedger]:
    ledger, device = make_ledger(*pools), FakeDevice(bytes_of)
    plan, capture = capture_graphs(prompts, decodes, ledger, estimate=estimate), None
    while True:
        try:
            step = plan.send(capture)
        except StopIteration as end:
            return end.value, device, ledger
        if step.refusal is not None:
            capture = Capture(None, step.refusal)
            continue
        used_bytes = device.capture(step)
        capture = Capture(used_bytes, step.refusal_of(used_bytes))
        if capture.given_up is not None:
            device.release(step.bucket)


def seed_bytes(bucket: Bucket) -> int:
    if bucket.phase is Phase.DECODE:
        return SEED_BYTES_PER_DECODE
    return bucket.num_tokens * SEED_BYTES_PER_TOKEN


def switches(steps: list[CaptureStep]) -> list[tuple[Phase, int, int]]:
    """Return phase, first and last index of each series of graphs of one phase."""
    runs: list[tuple[Phase, int, int]] = []
    for step in steps:
        if runs and runs[-1][0] is step.phase and runs[-1][2] == step.index - 1:
            runs[-1] = (step.phase, runs[-1][1], step.index)
        else:
            runs.append((step.phase, step.index, step.index))
    return runs


def test_prompts_go_by_tokens_and_decodes_by_batch():
    order = capture_order(SEED_PROMPTS, "min_tokens")
    assert [(b.batch, b.query_len) for b in order[:15]] == [
        *((1, 128), (2, 128), (1, 256), (1, 384), (4, 128), (2, 256), (1, 512), (1, 640)),
        *((2, 384), (1, 768), (1, 896), (4, 256), (2, 512), (1, 1024), (2, 640)),
    ]
    order = capture_order([decode(b, n) for b in (1, 32, 64) for n in (128, 256)], "max_bs")
    assert [(b.batch, b.blocks) for b in order] == [
        (64, 128),
        (64, 256),
        (32, 128),
        (32, 256),
        (1, 128),
        (1, 256),
    ]
    with pytest.raises(ConfigError, match="Unsupported graph allocation strategy: x"):
        capture_order(SEED_PROMPTS, "x")


def test_the_second_seed_stops_goes_on_and_ends_where_the_log_does():
    """The published log captures 11 prompts, 48 decodes, and prompts 12 to 15.

    It shows 7.92 GiB of prompt graphs in the first pass, more than the 4.755 GiB that it prints for
    them. Half of the graph memory, the default of VLLM_GRAPH_PROMPT_RATIO before 0.3, explains its
    order.
    """
    pools = split_graph_memory(SEED_GRAPH_BYTES, 0.5)
    found, device, ledger = run(SEED_PROMPTS, SEED_DECODES, pools, seed_bytes)
    assert switches(device.steps) == [
        (Phase.PREFILL, 1, 11),
        (Phase.DECODE, 1, 48),
        (Phase.PREFILL, 12, 15),
    ]
    at = {(step.phase, step.index): step.bucket for step in device.steps}
    assert at[Phase.PREFILL, 11] == prefill(1, 896)
    assert at[Phase.DECODE, 1] == decode(4, 128)
    assert at[Phase.DECODE, 48] == decode(1, 2048)
    assert at[Phase.PREFILL, 12] == prefill(4, 256)
    assert at[Phase.PREFILL, 15] == prefill(2, 640)
    prompts, decodes = found[Phase.PREFILL], found[Phase.DECODE]
    assert captured_line(Phase.PREFILL, prompts.captured, prompts.total, int(14.03 * GIB)) == (
        "Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:[(1, 128), (1, 256), "
        "(1, 384), (1, 512), (1, 640), (1, 768), (1, 896), (1, 1024), (2, 128), (2, 256), "
        "(2, 384), (2, 512), (2, 640), (4, 128), (4, 256)]"
    )
    assert prompts.used_bytes == pytest.approx(14.03 * GIB, rel=0.01)
    assert captured_line(
        Phase.DECODE, decodes.captured, decodes.total, decodes.used_bytes
    ).startswith("Graph/Decode captured:48 (100.0%) used_mem:161.9 MiB buckets:[(1, 128), ")
    assert (
        sum(ledger.booked(c) for c in MemoryClass)
        == prompts.used_bytes + decodes.used_bytes
        <= SEED_GRAPH_BYTES
    )


def test_with_the_printed_ratio_the_same_graphs_are_captured_the_decodes_come_earlier():
    pools = split_graph_memory(SEED_GRAPH_BYTES, 0.3)
    found, device, _ = run(SEED_PROMPTS, SEED_DECODES, pools, seed_bytes)
    assert switches(device.steps) == [
        (Phase.PREFILL, 1, 8),
        (Phase.DECODE, 1, 48),
        (Phase.PREFILL, 9, 15),
    ]
    assert found[Phase.PREFILL].total == 24


def test_the_second_pass_ends_with_nothing_left():
    """Four prompts take 10, 20, 20 and 40 MB of 55 MB, and two decodes 5 MB each of 45 MB."""
    prompts = [prefill(b, n) for b in (1, 2) for n in (128, 256)]
    decodes = [decode(b, 128) for b in (1, 2)]
    megabyte = 10**6

    def bytes_of(bucket: Bucket) -> int:
        is_decode = bucket.phase is Phase.DECODE
        return 5 * megabyte if is_decode else 10 * megabyte * bucket.num_tokens // 128

    found, device, ledger = run(prompts, decodes, (55 * megabyte, 45 * megabyte), bytes_of)
    assert switches(device.steps) == [
        (Phase.PREFILL, 1, 3),
        (Phase.DECODE, 1, 2),
        (Phase.PREFILL, 4, 4),
    ]
    assert found[Phase.PREFILL].used_bytes == 90 * megabyte
    assert found[Phase.DECODE].used_bytes == 10 * megabyte
    assert found[Phase.PREFILL].omitted == ()
    assert ledger.left(MemoryClass.PREFILL_GRAPHS) == 0


def test_what_prompts_leave_goes_to_decodes_too():
    decodes = [decode(b, 8) for b in (1, 2, 3)]
    found, device, ledger = run([prefill(1, 8)], decodes, (60, 25), lambda _: 10)
    # The third decode graph is expected to need 4 of the 5 bytes that are left. It needs 10, so it
    # has to wait.
    assert [(str(step.phase), step.index) for step in device.steps] == [
        ("prefill", 1),
        ("decode", 1),
        ("decode", 2),
        ("decode", 3),
        ("decode", 3),
    ]
    assert found[Phase.DECODE].omitted == ()
    assert ledger.left(MemoryClass.PREFILL_GRAPHS) == 0
    assert ledger.left(MemoryClass.DECODE_GRAPHS) == 45


def test_when_neither_phase_is_complete_there_is_no_second_pass():
    prompts, decodes = [prefill(1, 8), prefill(2, 8)], [decode(1, 8), decode(2, 8)]
    found, device, _ = run(prompts, decodes, (15, 15), lambda _: 12)
    assert len(device.steps) == 2
    assert [len(found[phase].omitted) for phase in Phase] == [1, 1]


def test_a_graph_that_turns_out_too_large_is_thrown_away_and_named():
    found, device, ledger = run([prefill(1, 128), prefill(1, 256)], [], (100, 0), lambda b: 300)
    assert device.held == {}
    assert sum(ledger.booked(c) for c in MemoryClass) == 0
    first, second = found[Phase.PREFILL].omitted
    assert str(first) == (
        "no graph for prefill (1, 128, 0): the graph took 300 B, but only 100 B are left for graphs"
    )
    assert str(second) == (
        "no graph for prefill (1, 256, 0): the graph would take about 599 B, but only 100 B are "
        "left for graphs"
    )
    assert len(device.steps) == 1, "what is known not to fit is not captured again"


def test_a_known_size_may_use_up_everything():
    found, _, ledger = run(
        [prefill(1, 128), prefill(1, 256)], [], (100, 0), lambda _: 50, estimate=lambda _: 50
    )
    assert found[Phase.PREFILL].omitted == ()
    assert ledger.left(MemoryClass.PREFILL_GRAPHS) == 0


def test_without_memory_nothing_is_captured():
    found, device, _ = run(SEED_PROMPTS, SEED_DECODES, (0, 0), seed_bytes)
    assert device.steps == []
    assert len(found[Phase.PREFILL].omitted) == 24


buckets_of = {
    Phase.PREFILL: st.builds(prefill, st.integers(1, 8), st.integers(1, 8)),
    Phase.DECODE: st.builds(decode, st.integers(1, 8), st.integers(1, 8)),
}


@given(
    prompts=st.sets(buckets_of[Phase.PREFILL], max_size=8),
    decodes=st.sets(buckets_of[Phase.DECODE], max_size=8),
    pools=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    seed=st.integers(0, 1000),
    knows_sizes=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_no_budget_is_exceeded_and_no_bucket_lost(prompts, decodes, pools, seed, knows_sizes):
    def bytes_of(bucket: Bucket) -> int:
        return hash((seed, bucket.batch, bucket.query_len, bucket.blocks)) % 90

    found, device, ledger = run(
        sorted(prompts), sorted(decodes), pools, bytes_of, bytes_of if knows_sizes else None
    )
    assert sum(ledger.booked(c) for c in MemoryClass) == sum(device.held.values()) <= sum(pools)
    for phase, buckets in ((Phase.PREFILL, prompts), (Phase.DECODE, decodes)):
        graphs = found[phase]
        assert {*graphs.captured, *(o.bucket for o in graphs.omitted)} == buckets
        assert graphs.total == len(buckets)
        assert all(b in device.held for b in graphs.captured)
    if knows_sizes:
        assert len(device.steps) == len(device.held), "nothing is captured in vain"
