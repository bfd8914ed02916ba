"""Test the lines of a step report on the simulated card, word for word."""

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from vllm.bucketing.bucket import Phase
from vllm.worker.hpu.launches import step_report
from vllm.worker.hpu.launches.step_report import StepReport, StepShape, not_warmed_line

SHAPE = StepShape.of([300, 129], 128, is_prompt=True)
SHAPE_TEXT = "is_prompt: True, num_seqs: 2, max_context_len: 300, max_num_blocks 3"
NO_FALLBACK = "VLLM_HPU_STEP_CPU_FALLBACK: [('TotalNumber', 0), ('FallbackOps', {})], "
NO_COMPILATION = (
    "VLLM_HPU_STEP_GRAPH_COMPILATION: [('TotalNumber', 0), ('TotalTime', 0), ('AvgTime', 0)], "
)


@pytest.fixture
def lazy() -> SimBridge:
    return SimBridge("gaudi2", is_lazy=True)


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(step_report.logger, "propagate", False)
    monkeypatch.setattr(step_report.logger, "handlers", [caplog.handler])
    return caplog


def describe() -> StepShape:
    return SHAPE


def compile_something(length: int) -> None:
    torch.ones(length).to("hpu").add(1)


def fall_back() -> None:
    """Run a stable sort, for which the card has no kernel."""
    torch.ones(3, 64).to("hpu").sort(stable=True, dim=1)


@pytest.mark.parametrize(
    ("seq_lens", "text"),
    [
        ([300, 129], "num_seqs: 2, max_context_len: 300, max_num_blocks 3"),
        ([128], "num_seqs: 1, max_context_len: 128, max_num_blocks 1"),
        ([129], "num_seqs: 1, max_context_len: 129, max_num_blocks 2"),
        ([], "num_seqs: 0, max_context_len: 128, max_num_blocks 1"),
    ],
)
def test_the_shape_of_a_step_names_the_longest_row_and_its_blocks(seq_lens, text):
    assert str(StepShape.of(seq_lens, 128, is_prompt=False)) == f"is_prompt: False, {text}"


def test_a_compilation_is_reported_with_its_time(lazy, log):
    report = StepReport(lazy, log_compilations="some")
    before = lazy.counters().compile_s
    with report.step(describe):
        compile_something(3)  # only recorded so far: compiling happens when the step is waited for
    micros = round((lazy.counters().compile_s - before) * 1e6)
    assert micros > 0
    stats = f"[('TotalNumber', 1), ('TotalTime', {micros}), ('AvgTime', {micros})]"
    assert log.messages == [f"VLLM_HPU_STEP_GRAPH_COMPILATION: {stats}, {SHAPE_TEXT}"]
    assert [record.levelname for record in log.records] == ["WARNING"]


def test_recipes_are_listed_with_their_times_on_request(lazy, log):
    compile_something(2)
    lazy.mark_step()
    with StepReport(lazy, "some", log_recipes=True).step(describe):
        compile_something(3)
    ((name, micros),) = lazy.counters().recipes[1:]
    assert micros > 0
    assert f"('AvgTime', {micros}), ('recipe', [('{name}', {micros})])], is_prompt" in log.text


def test_the_average_is_per_compilation(lazy, log):
    report = StepReport(lazy, log_compilations="some")
    before = lazy.counters().compile_s
    with report.step(describe):
        for length in (3, 4):
            compile_something(length)
            lazy.mark_step()
    micros = round((lazy.counters().compile_s - before) * 1e6)
    assert f"('TotalNumber', 2), ('TotalTime', {micros}), ('AvgTime', {micros // 2})" in log.text


def test_an_operator_on_the_host_is_reported_with_its_name(lazy, log):
    # In an earlier step, this operator also runs on the host.
    torch.ones(3, 64).to("hpu").int().topk(2)
    report = StepReport(lazy, log_fallbacks="some")
    with report.step(describe):
        fall_back()
        fall_back()
    stats = "[('TotalNumber', 2), ('FallbackOps', {'aten::sort.stable': 2})]"
    assert log.messages == [f"VLLM_HPU_STEP_CPU_FALLBACK: {stats}, {SHAPE_TEXT}"]


@pytest.mark.parametrize(
    ("compilations", "fallbacks", "lines"),
    [
        ("off", "off", []),
        ("some", "some", []),
        ("all", "some", [NO_COMPILATION]),
        ("some", "all", [NO_FALLBACK]),
        ("all", "all", [NO_COMPILATION, NO_FALLBACK]),
    ],
)
def test_a_step_that_cost_nothing_is_reported_only_on_request(
    lazy, log, compilations, fallbacks, lines
):
    compile_something(3)
    lazy.mark_step()
    with StepReport(lazy, compilations, fallbacks).step(describe):
        compile_something(3)
    assert log.messages == [line + SHAPE_TEXT for line in lines]


def test_a_report_that_is_off_reads_no_counters_and_describes_nothing(lazy, log, monkeypatch):
    asked = []
    monkeypatch.setattr(lazy, "counters", lambda: asked.append("counters"))
    monkeypatch.setattr(lazy, "synchronize", lambda: asked.append("synchronize"))
    with StepReport(lazy).step(lambda: asked.append("shape")):
        compile_something(3)
    assert (asked, log.messages) == ([], [])


def test_the_exception_of_a_step_comes_through(lazy, log):
    with pytest.raises(KeyError), StepReport(lazy, "all", "all").step(describe):
        raise KeyError
    assert log.messages == []


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((Phase.PREFILL, 1, 36864, 0), "(prompt, 1, 36864)"),
        ((Phase.PREFILL, 4, 128, 16), "(prompt, 4, 128, 16)"),
        ((Phase.DECODE, 8, 1, 256), "(decode, 8, 256)"),
    ],
)
def test_a_shape_that_was_not_warmed_is_named_once(lazy, log, shape, text):
    report = StepReport(lazy)
    assert not report.check_warmed(*shape)
    assert report.check_warmed(*shape)
    assert log.messages == [f"Configuration: {text} was not warmed-up!"]
    assert log.messages == [not_warmed_line(*shape)]
    assert [record.levelname for record in log.records] == ["WARNING"]


def test_a_warmed_shape_is_known_and_others_are_not(lazy, log):
    report = StepReport(lazy)
    report.mark_warmed(Phase.DECODE, 8, 1, 256)
    assert report.check_warmed(Phase.DECODE, 8, 1, 256)
    assert not report.check_warmed(Phase.PREFILL, 8, 1, 256)
    assert log.messages == ["Configuration: (prompt, 8, 1, 256) was not warmed-up!"]


def test_compilations_count_from_the_end_of_the_warm_up(lazy):
    report = StepReport(lazy)
    compile_something(3)
    assert report.compilations_after_warmup() == 0
    report.finish_warmup()  # operators that the warm-up recorded still count as warm-up
    assert report.compilations_after_warmup() == 0
    for length in (3, 4, 5):
        compile_something(length)
        lazy.mark_step()
    assert report.compilations_after_warmup() == 2
