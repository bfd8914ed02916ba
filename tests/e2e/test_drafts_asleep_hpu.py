"""Test on the simulated card that the source of drafts sleeps and wakes up with the model."""

import pytest

from tests.e2e.test_pipeline_drafts import ON_CARDS, run_few
from tests.e2e.test_speculators import COMMON, PARAMS, prompts
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.reach import core_of, stats_of
from tests.speculators import make_speculator, make_target
from vllm import LLM
from vllm.errors import CapacityError
from vllm.platforms.habana.bridge import HabanaBridge


def used_bytes(bridge: HabanaBridge) -> int:
    memory = bridge.memory_info()
    return memory.total_bytes - memory.free_bytes


def leave_in_the_middle(llm: LLM) -> None:
    """Start requests, and abort them after the first step with drafts."""
    engine = llm.llm_engine
    core, drafted = engine.engine_core, stats_of(engine).drafts.num_drafts
    for index, prompt in enumerate(prompts()[1:3]):
        engine.add_request(str(index), prompt, PARAMS[0])
    while core.stats().drafts.num_drafts == drafted:
        assert engine.has_unfinished_requests(), "no request got drafts"
        engine.step()
    with pytest.raises(CapacityError, match="cannot sleep while requests run"):
        llm.sleep()
    assert engine.has_unfinished_requests()
    engine.abort_request(["0", "1"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_what_makes_drafts_sleeps_with_the_model(method, tmp_path):
    target = make_target(tmp_path / "target")
    config = {"method": method, "model": str(target)}
    if method != "draft_model":
        config = make_speculator(method, target, tmp_path / "eagle-head").config
    card = simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS)
    with card as bridge:
        llm = LLM(
            str(target),
            speculative_config={"adaptive": False, **config},
            enable_sleep_mode=True,
            sampling_warmup="all",
            **{**COMMON, **ON_CARDS},
        )
        want, used = run_few(llm), used_bytes(bridge)
        stats = core_of(llm).stats
        num_right = sum(stats().drafts.accepted)
        assert num_right
        for level in (1, 2):
            leave_in_the_middle(llm)
            llm.sleep(level)
            assert used_bytes(bridge) < used / 2
            llm.wake_up()
            before = sum(stats().drafts.accepted)
            assert run_few(llm) == want
            assert sum(stats().drafts.accepted) - before == num_right
