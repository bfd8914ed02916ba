"""What makes drafts sleeps and wakes up with the model, on the simulated card."""

import pytest

from tests.e2e.test_pipeline_drafts import ON_CARDS, run_few
from tests.e2e.test_speculators import COMMON
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.speculators import make_speculator, make_target
from vllm import LLM
from vllm.platforms.habana.bridge import HabanaBridge


def used_bytes(bridge: HabanaBridge) -> int:
    memory = bridge.memory_info()
    return memory.total_bytes - memory.free_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_what_makes_drafts_sleeps_with_the_model(method, tmp_path):
    target = make_target(tmp_path / "target")
    config = {"method": method, "model": str(target)}
    if method != "draft_model":
        config = make_speculator(method, target, tmp_path / "eagle-head").config
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS) as bridge:
        llm = LLM(
            str(target),
            speculative_config={"adaptive": False, **config},
            enable_sleep_mode=True,
            sampling_warmup="all",
            **{**COMMON, **ON_CARDS},
        )
        want, used = run_few(llm), used_bytes(bridge)
        stats = llm.llm_engine.engine_core.stats
        num_right = sum(stats().drafts.accepted)
        assert num_right
        for level in (1, 2):
            llm.sleep(level)
            assert used_bytes(bridge) < used / 2
            llm.wake_up()
            before = sum(stats().drafts.accepted)
            assert run_few(llm) == want
            assert sum(stats().drafts.accepted) - before == num_right
