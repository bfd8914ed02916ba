"""Test calls to the workers, sleep mode and traces, with the bundled model in this process."""

import gzip
import json
import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm import LLM, SamplingParams, envs
from vllm.assets import BUNDLED_MODEL
from vllm.errors import EngineAsleepError, RequestError, WeightLoadError
from vllm.model_executor.model_memory import model_storages

PROMPTS = ["import os\n", "def main(", "class Queue:\n    def"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CACHE_BLOCKS = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for traces and for the checkpoint, which a test changes."""
    folder: Path = tmp_path_factory.mktemp("control")
    shutil.copytree(BUNDLED_MODEL, folder / "model")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TORCH_PROFILER_DIR", str(folder / "traces"))
        envs.get.cache_clear()
        llm = LLM(
            str(folder / "model"),
            enable_sleep_mode=True,
            worker_extension_cls="tests.e2e.worker_extension.WorkerExtension",
            max_model_len=256,
            num_gpu_blocks_override=CACHE_BLOCKS,
            max_num_seqs=8,
        )
    envs.get.cache_clear()
    yield llm
    llm.llm_engine.shutdown()


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return generate(llm)


def resident_bytes(llm: LLM) -> int:
    (found,) = llm.collective_rpc("describe")
    return found["resident_pages"] * mmap.PAGESIZE


def weight_bytes(llm: LLM) -> int:
    return sum(llm.apply_model(lambda model: sum(map(len, model_storages(model)))))


def negate_norm(model: torch.nn.Module) -> None:
    """Change the sign of a norm, so that the model generates other tokens."""
    with torch.no_grad():
        model.model.norm.weight.neg_()


def test_workers_are_called_by_name_and_with_functions(llm):
    (found,) = llm.collective_rpc("describe", kwargs={"text": "x"})
    assert found["text"] == "x" and found["device"] == "cpu"
    assert llm.collective_rpc(lambda worker, a: (worker.rank, a), args=(5,)) == [(0, 5)]
    assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    with pytest.raises(RequestError, match="no method 'explain'"):
        llm.collective_rpc("explain")
    with pytest.raises(ZeroDivisionError):
        llm.apply_model(lambda model: 1 / 0)
    assert len(generate(llm)) == len(PROMPTS)


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_the_same_tokens_come_afterwards(llm, expected, level):
    (cache_bytes,) = llm.collective_rpc("fill_cache")
    llm.reset_prefix_cache()  # the contents of the cached blocks have been overwritten
    awake = resident_bytes(llm)
    llm.sleep(level)
    given_back = awake - resident_bytes(llm)
    assert given_back > 0.9 * (weight_bytes(llm) + cache_bytes)
    assert llm.llm_engine.is_sleeping()
    with pytest.raises(EngineAsleepError, match="prompt 0 of 3: the engine is asleep"):
        generate(llm)
    llm.wake_up(["weights"])
    assert awake - resident_bytes(llm) > 0.9 * cache_bytes
    with pytest.raises(EngineAsleepError, match=r"asleep \(kv_cache\)"):
        generate(llm)
    llm.wake_up(["kv_cache"])
    assert not llm.llm_engine.is_sleeping()
    assert generate(llm) == expected


def test_weights_that_were_changed_survive_level_1_and_not_level_2(llm, expected):
    llm.apply_model(negate_norm)
    llm.reset_prefix_cache()
    changed = generate(llm)
    assert changed != expected
    llm.sleep(1)
    llm.wake_up()
    assert generate(llm) == changed
    llm.sleep(2)
    llm.wake_up()
    assert generate(llm) == expected


def test_weights_are_read_again_in_place_also_from_another_folder(llm, expected, tmp_path):
    llm.apply_model(negate_norm)
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    assert generate(llm) == expected
    with pytest.raises(WeightLoadError, match="no weights in"):
        llm.collective_rpc("reload_weights", args=(str(tmp_path),))
    assert generate(llm) == expected
    llm.sleep(2)
    llm.collective_rpc("reload_weights", args=(str(tmp_path),))
    with pytest.raises(WeightLoadError, match="no weights in"):
        llm.wake_up()
    assert llm.llm_engine.is_sleeping()
    llm.collective_rpc("reload_weights", args=(str(BUNDLED_MODEL),))
    llm.wake_up()
    assert generate(llm) == expected


def test_level_1_notices_a_checkpoint_that_has_changed(llm, expected, folder):
    file = folder / "model" / "model.safetensors"
    llm.collective_rpc("reload_weights", args=(str(folder / "model"),))
    data = file.read_bytes()
    llm.sleep(1)
    file.write_bytes(data[:-4000] + bytes(4000))
    with pytest.raises(WeightLoadError, match=r"differ from the weights that were loaded.*level 2"):
        llm.wake_up()
    assert llm.llm_engine.is_sleeping()
    file.write_bytes(data)
    llm.wake_up()
    assert generate(llm) == expected


def test_a_trace_has_the_steps_that_ran_in_it(llm, folder):
    with pytest.raises(RequestError, match="no trace is being recorded"):
        llm.stop_profile()
    llm.start_profile()
    with pytest.raises(RequestError, match="is being recorded already"):
        llm.start_profile()
    generate(llm)
    llm.stop_profile()
    (path,) = (folder / "traces").glob("rank0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("step ")]
    assert len(steps) == 12 and steps[-1].endswith(": 3 requests, 3 tokens")


def test_without_sleep_mode_and_folder_both_are_refused_with_what_to_set():
    plain = LLM(max_model_len=256, num_gpu_blocks_override=50, max_num_seqs=4)
    for call in (plain.sleep, plain.wake_up):
        with pytest.raises(RequestError, match="enable_sleep_mode=True"):
            call()
    with pytest.raises(RequestError, match="VLLM_TORCH_PROFILER_DIR"):
        plain.start_profile()
    with pytest.raises(RequestError, match="disable_log_stats=False"):
        plain.get_metrics()
    plain.llm_engine.shutdown()
