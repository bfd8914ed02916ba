"""Test that drafts of all methods change no token in a pipeline."""

from dataclasses import replace as replace_field

import pytest
from msgspec.structs import replace

from tests.e2e.test_draft_model import FEW_BLOCKS as CROWDED
from tests.e2e.test_draft_model import drafts_of, with_draft
from tests.e2e.test_draft_model import expected as expected_texts
from tests.e2e.test_draft_model import run as run_texts
from tests.e2e.test_speculators import (
    COMMON,
    FEW_BLOCKS,
    METHODS,
    PARAMS,
    expected,
    made,
    prompts,
    run,
    with_speculator,
)
from tests.executor.thread_ranks import ThreadRanks
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import draft_model_of, executor_of, program_of, stats_of
from tools.save_sharded_state import save
from vllm import LLM
from vllm.assets import BUNDLED_MODEL
from vllm.engine import engine_core
from vllm.env import ranks as env_ranks
from vllm.errors import WeightLoadError
from vllm.model_executor.speculators.eagle import Eagle3
from vllm.ops.cpu.library import load_cpu_kernels

__all__ = ["expected", "expected_texts", "made"]


@pytest.fixture
def in_threads(monkeypatch):
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)


ON_CARDS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 33}


def run_few(llm: LLM) -> list[list[int]]:
    params = [replace(each, max_tokens=8) for each in PARAMS]
    few = [prompts()[index] for index in (1, 2)]
    return [list(o.outputs[0].token_ids) for o in llm.generate(few, params, use_tqdm=False)]


def sizes(tensor: int, stages: int) -> dict[str, int]:
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": stages,
        "pipeline_steps_in_flight": stages,
    }


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [(1, 2), *(pytest.param(*sizes, marks=pytest.mark.exhaustive) for sizes in ((2, 2), (1, 3)))],
)
def test_a_draft_model_is_on_the_first_stage(tensor, stages, expected_texts, in_threads):
    llm = with_draft(BUNDLED_MODEL, **CROWDED, **sizes(tensor, stages))
    executor = executor_of(llm)
    has_drafter = [worker.runner.drafter is not None for worker in executor.workers]
    assert has_drafter == [True] * tensor + [False] * tensor * (stages - 1)
    assert run_texts(llm) == expected_texts
    assert run_texts(llm) == expected_texts, "with a prefix cache"
    num_drafts, num_right = drafts_of(llm)
    assert num_drafts > num_right > 0.8 * num_drafts > 100
    stats = stats_of(llm)
    assert stats.num_preemptions and stats.num_prefix_hits
    assert executor.most_in_flight == stages
    executor.shutdown()


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=() if m == "eagle" else pytest.mark.exhaustive) for m in METHODS],
)
def test_a_speculator_is_on_the_last_stage(method, made, expected, in_threads):
    tensor = 2 if method == "mlp_speculator_tied" else 1
    llm = with_speculator(made[method], **FEW_BLOCKS, **sizes(tensor, 2))
    executor = executor_of(llm)
    has_drafter = [worker.runner.drafter is not None for worker in executor.workers]
    assert has_drafter == [False] * tensor + [True] * tensor
    assert run(llm) == expected[method]
    assert run(llm) == expected[method], "with a prefix cache"
    stats = stats_of(llm)
    assert stats.num_preemptions and stats.num_prefix_hits
    assert 0 < sum(stats.drafts.accepted) < stats.drafts.num_draft_tokens
    executor.shutdown()


@pytest.mark.parametrize(
    "sizes_", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in ((2, 1), (1, 2))), (2, 2)]
)
def test_a_speculator_reads_the_files_of_the_stages(sizes_, made, expected, in_threads, tmp_path):
    """The last stage finds the embedding in the file of the first stage."""
    tensor, stages = sizes_
    save(str(made["eagle"].target), tmp_path, tensor, num_stages=stages)
    split = replace_field(made["eagle"], target=tmp_path)
    values = FEW_BLOCKS | {"load_format": "sharded_state"}
    llm = with_speculator(split, **values, **sizes(tensor, stages))
    assert run(llm) == expected["eagle"]
    executor_of(llm).shutdown()


def test_a_speculator_of_the_checkpoint_is_not_in_files_of_ranks(made, in_threads, tmp_path):
    save(str(made["mtp"].target), tmp_path, 1)
    split = replace_field(made["mtp"], target=tmp_path)
    with pytest.raises(
        WeightLoadError, match="Load the original checkpoint, without --load-format"
    ):
        with_speculator(split, **FEW_BLOCKS, load_format="sharded_state")


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_inputs_of_inner_layers_pass_through_stages_that_run_as_programs(
    made, monkeypatch, in_threads
):
    values = {**FEW_BLOCKS, "num_gpu_blocks_override": 80}
    want = run(LLM(str(made["eagle3"].target), **{**COMMON, **values}))
    kept = []
    keep = Eagle3.keep
    monkeypatch.setattr(
        Eagle3, "keep", lambda self, x, inner: kept.append(len(inner)) or keep(self, x, inner)
    )
    llm = with_speculator(made["eagle3"], **values, **sizes(1, 3))
    executor = executor_of(llm)
    assert run(llm) == want
    assert set(kept) == {len(draft_model_of(executor.workers[-1]).inner_layers)}
    assert all(program_of(worker.runner) is not None for worker in executor.workers)
    executor.shutdown()


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        pytest.param("draft_model", "HPU graphs", marks=pytest.mark.exhaustive),
        pytest.param("eagle3", "HPU graphs", marks=pytest.mark.exhaustive),
        pytest.param("medusa", "torch.compile", marks=pytest.mark.exhaustive),
        pytest.param("mlp_speculator", "lazy", marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_on_cards_change_no_token(method, mode, made, monkeypatch):
    speculator = made["eagle" if method == "draft_model" else method]
    config = {"adaptive": False, **speculator.config}
    if method == "draft_model":
        config = {"adaptive": False, "method": method, "model": str(speculator.target)}
    for name, value in env_ranks.rank_variables(0, 1).items():
        # An engine changes these variables; monkeypatch restores them afterwards.
        monkeypatch.setenv(name, value)
    is_lazy, is_eager = MODES[mode]
    want = run_few(LLM(str(speculator.target), device="cpu", **COMMON))
    with simulated_hpu(
        PT_HPU_LAZY_MODE=is_lazy, PT_HPU_ENABLE_LAZY_COLLECTIVES=True, **FEW_BUCKETS
    ):
        llm = LLM(
            str(speculator.target),
            device="hpu",
            enforce_eager=is_eager,
            speculative_config=config,
            sampling_warmup="all",
            worker_extension_cls="tests.executor.late_compilations.LateCompilations",
            **{**COMMON, **ON_CARDS, **sizes(1, 2)},
        )
        executor = executor_of(llm)
        assert run_few(llm) == want
        assert sum(stats_of(llm).drafts.accepted)
        assert set(executor.collective_rpc("late_compilations")) == {0}
        executor.shutdown()
