"""Test VLLM_PROFILE_STEPS: a trace that starts and stops by itself."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.worker.torch_profile import TorchProfile


class FakeStep:
    """The values of a step that a trace contains."""

    def __init__(self, step_id: int) -> None:
        self.step_id, self.rows, self.num_tokens = step_id, [0], 1


def test_the_steps_that_were_asked_for_are_traced_and_no_others(tmp_path: Path) -> None:
    profile = TorchProfile(str(tmp_path), "rank0", (2, 3))
    for step_id in range(5):
        step: Any = FakeStep(step_id)
        with profile.step(step):
            pass
    (path,) = tmp_path.glob("rank0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event["name"].startswith("step ")]
    assert names == ["step 1: 1 requests, 1 tokens", "step 2: 1 requests, 1 tokens"]


@pytest.mark.parametrize("text", ["3", "5,3", "0,1", "1,2,3", "a,b"])
def test_steps_that_cannot_be_traced_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PROFILE_STEPS", text)
    envs.get.cache_clear()
    try:
        with pytest.raises(ConfigError, match=f"VLLM_PROFILE_STEPS='{text}' must be the first and"):
            EngineArgs(device="cpu").create_engine_config()
    finally:
        monkeypatch.delenv("VLLM_PROFILE_STEPS")
        envs.get.cache_clear()
