"""Drafts of all methods in stages of a pipeline change no token."""

import pytest

from tests.e2e.test_draft_model import FEW_BLOCKS as CROWDED
from tests.e2e.test_draft_model import drafts_of, with_draft
from tests.e2e.test_draft_model import expected as expected_texts
from tests.e2e.test_draft_model import run as run_texts
from tests.e2e.test_speculators import FEW_BLOCKS, METHODS, expected, made, run, with_speculator
from tests.executor.thread_ranks import ThreadRanks
from vllm.assets import BUNDLED_MODEL
from vllm.engine import engine_core

__all__ = ["expected", "expected_texts", "made"]


@pytest.fixture
def in_threads(monkeypatch):
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)


def sizes(tensor: int, stages: int) -> dict[str, int]:
    return {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}


@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (2, 2), (1, 3)])
def test_a_draft_model_is_on_the_first_stage(tensor, stages, expected_texts, in_threads):
    llm = with_draft(BUNDLED_MODEL, **CROWDED, **sizes(tensor, stages))
    executor = llm.llm_engine.engine_core.executor
    has_drafter = [worker.runner.drafter is not None for worker in executor.workers]
    assert has_drafter == [True] * tensor + [False] * tensor * (stages - 1)
    assert run_texts(llm) == expected_texts
    assert run_texts(llm) == expected_texts, "with a prefix cache"
    num_drafts, num_right = drafts_of(llm)
    assert num_drafts > num_right > 0.8 * num_drafts > 100
    stats = llm.llm_engine.engine_core.stats()
    assert stats.num_preemptions and stats.num_prefix_hits
    assert executor.most_in_flight == stages
    executor.shutdown()


@pytest.mark.parametrize("method", METHODS)
def test_a_speculator_is_on_the_last_stage(method, made, expected, in_threads):
    tensor = 2 if method == "mlp_speculator_tied" else 1
    llm = with_speculator(made[method], **FEW_BLOCKS, **sizes(tensor, 2))
    executor = llm.llm_engine.engine_core.executor
    has_drafter = [worker.runner.drafter is not None for worker in executor.workers]
    assert has_drafter == [False] * tensor + [True] * tensor
    assert run(llm) == expected[method]
    assert run(llm) == expected[method], "with a prefix cache"
    stats = llm.llm_engine.engine_core.stats()
    assert stats.num_preemptions and stats.num_prefix_hits
    assert 0 < sum(stats.drafts.accepted) < stats.drafts.num_draft_tokens
    executor.shutdown()
