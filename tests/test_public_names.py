"""Test that every name that programs written for vLLM import exists and works."""

import gc
import importlib
import inspect
import subprocess
import sys
import types
import weakref
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.hpu import simulated_hpu
from tests.loops import loop_over
from tests.public_names import (
    ENGINE_ARGUMENTS,
    LLM_METHODS,
    PROGRAMS,
    PROTOCOL_FIELDS,
    PUBLIC_NAMES,
    SAMPLING_FIELDS,
)
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai import protocol
from vllm.errors import ConfigError, RequestError
from vllm.lora.request import LoRARequest
from vllm.utils import Counter, FlexibleArgumentParser, random_uuid

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_every_name_can_be_imported(module):
    found = importlib.import_module(module)
    missing = [name for name in PUBLIC_NAMES[module] if not hasattr(found, name)]
    assert not missing


@loop_over("name", PROTOCOL_FIELDS)
def test_every_body_has_its_fields(name):
    fields = getattr(protocol, name).model_fields
    assert set(PROTOCOL_FIELDS[name].split()) <= fields.keys()
    assert name in protocol.__all__


@pytest.mark.parametrize("name", LLM_METHODS)
def test_every_method_of_the_offline_class_takes_its_arguments_in_order(name):
    parameters = list(inspect.signature(getattr(LLM, name)).parameters)
    assert [p for p in parameters if p not in ("self", "cls")] == LLM_METHODS[name].split()


def test_every_sampling_parameter_is_a_field_in_its_place():
    names = SAMPLING_FIELDS.split()
    assert list(inspect.signature(SamplingParams).parameters)[: len(names)] == names


def test_every_engine_argument_is_known_as_a_keyword_and_a_flag():
    names = ENGINE_ARGUMENTS.split()
    EngineArgs(**dict.fromkeys(names))
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert not [name for name in names if f"--{name.replace('_', '-')}" not in flags]


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_program_can_be_run_as_a_module(module):
    source = importlib.util.find_spec(module).origin
    assert 'if __name__ == "__main__":' in Path(source).read_text()


def test_names_that_hold_data_load_no_torch():
    """Programs import these names in a client, or next to another engine."""
    light = ("vllm.lora.request", "vllm.sequence", "vllm.inputs", "vllm.assets.image", "vllm.utils")
    code = f"import sys, {', '.join(light)}; print(sorted({{'torch'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


# ---- what the public names do --------------------------------------------------------------------


def test_a_counter_counts_from_its_start_and_again_from_zero():
    counter = Counter(3)
    assert [next(counter), next(counter)] == [3, 4]
    assert counter.counter == 5
    counter.reset()
    assert next(counter) == 0


def test_random_ids_are_hexadecimal_and_differ():
    ids = {random_uuid() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)


def test_an_adapter_is_named_by_position_and_told_apart_by_its_name():
    adapter = LoRARequest("sql", 1, "/adapters/sql")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("sql", 1, "/adapters/sql")
    assert LoRARequest("sql", 2, lora_local_path="/old") == adapter
    assert len({adapter, LoRARequest("sql", 1, "/x"), LoRARequest("c", 1, "/x")}) == 2
    assert adapter != "sql"
    with pytest.raises(AttributeError):
        adapter.lora_path = "/elsewhere"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sql", 0, "/x"), "lora_int_id must be at least 1, got 0"),
        (("sql", 1), "lora_path of the adapter 'sql' is empty"),
    ],
)
def test_an_adapter_without_number_or_path_is_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        LoRARequest(*arguments)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_a_ray_cluster_without_ray_is_one_line_with_what_to_install():
    from vllm import initialize_ray_cluster

    with pytest.raises(ConfigError, match=r"^distributed_executor_backend='ray' needs .*vllm\[ray"):
        initialize_ray_cluster()


def test_variables_of_the_environment_are_attributes():
    from vllm import envs

    assert envs.VLLM_LOGGING_LEVEL == envs.get().VLLM_LOGGING_LEVEL
    with pytest.raises(AttributeError, match=r"'vllm\.envs' has no attribute 'VLLM_NO_SUCH'"):
        envs.VLLM_NO_SUCH  # noqa: B018


def test_a_line_of_a_batch_is_read_as_the_body_of_its_route():
    line = {"custom_id": "a", "method": "POST", "url": "/v1/score"}
    read = protocol.BatchRequestInput(**line, body={"text_1": "a", "text_2": ["b"]})
    assert isinstance(read.body, protocol.ScoreRequest)
    with pytest.raises(ValueError, match="text_1"):
        protocol.BatchRequestInput(**line, body={"prompt": "a"})


def test_a_transcription_has_its_usage_only_in_a_stream():
    assert protocol.TranscriptionRequest(file=b"", stream=True, stream_include_usage=True).stream
    with pytest.raises(ValueError, match="stream_include_usage: needs stream=true"):
        protocol.TranscriptionRequest(file=b"", stream_include_usage=True)


def test_cleaning_up_ends_process_groups_leaves_ray_and_collects_cycles(monkeypatch, tmp_path):
    import torch

    from vllm.distributed import cleanup_dist_env_and_memory

    class Cycle:
        pass

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    ray = types.ModuleType("ray")
    left = []
    ray.shutdown = lambda: left.append(True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    gc.disable()
    try:
        cycle = Cycle()
        cycle.own = cycle
        reference = weakref.ref(cycle)
        del cycle
        cleanup_dist_env_and_memory()
        assert reference() is None
    finally:
        gc.enable()
    assert not torch.distributed.is_initialized()
    assert not left
    cleanup_dist_env_and_memory(shutdown_ray=True)
    assert left


def check_platform(device):
    import torch

    from vllm.platforms import current_platform

    assert current_platform.device_type == current_platform.device_name == device
    assert current_platform.is_cpu() is (device == "cpu")
    assert current_platform.is_hpu() is (device == "hpu")
    assert not current_platform.is_cuda() and not current_platform.is_cuda_alike()
    current_platform.seed_everything(7)
    first = torch.rand(3)
    current_platform.seed_everything(7)
    assert torch.equal(torch.rand(3), first)
    current_platform.seed_everything(None)
    return current_platform.get_device_name()


def test_the_current_platform_says_which_device_it_is():
    assert check_platform("cpu")
    with simulated_hpu():
        assert check_platform("hpu") == "GAUDI2"
