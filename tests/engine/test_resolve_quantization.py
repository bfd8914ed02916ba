"""Test `--quantization`: accepted values, and values that are refused before anything is loaded."""

import json

import pytest

from tests.engine.test_resolve_config import resolve, write_model
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.platforms import resolve_platform
from vllm.utils import FlexibleArgumentParser


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("name", ["int8", "int4", "bitsandbytes"])
def test_the_formats_of_the_cpu_are_taken(name, dtype):
    assert resolve(quantization=name, dtype=dtype).model.quantization == name


@pytest.mark.parametrize("named", [{}, {"quantization": "bitsandbytes"}])
def test_the_load_format_of_bitsandbytes_is_its_quantization(named):
    config = resolve(load_format="bitsandbytes", **named)
    assert (config.model.quantization, config.load.load_format) == ("bitsandbytes", "auto")


@pytest.mark.parametrize("flags", [("--quantization", "int8"), ("-q", "int8")])
def test_the_flag_has_a_short_form(flags):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm test"))
    assert EngineArgs.from_cli_args(parser.parse_args(flags)).quantization == "int8"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "inc"}, "'inc' needs the file of its scales: set QUANT_CONFIG"),
        (
            {"quantization": "int8", "quant_config": "quant.json"},
            "QUANT_CONFIG=quant.json is for quantization='inc', not 'int8'",
        ),
        ({"quant_config": "nowhere.json"}, "QUANT_CONFIG nowhere.json cannot be read"),
        ({"quantization": "INT8"}, "'INT8' is not available"),
        ({"quantization": "int8", "dtype": "half"}, "needs dtype bfloat16 or float32, got float16"),
        (
            {"quantization": "int8", "load_format": "bitsandbytes"},
            "load_format='bitsandbytes' is for quantization='bitsandbytes', not 'int8'",
        ),
        ({"lm_head_quantization": "int4"}, "'int4' is not valid|must be"),
        (
            {"lm_head_quantization": "int8", "dtype": "half"},
            "lm_head_quantization='int8' needs dtype bfloat16 or float32, got float16",
        ),
        ({"lm_head_quantization": "int8", "task": "embed"}, "a pooling model has no output head"),
    ],
)
def test_what_the_cpu_cannot_do_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**settings)


def test_without_the_kernels_there_is_none(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KERNELS", "0")
    envs.get.cache_clear()
    try:
        with pytest.raises(ConfigError, match="available: inc"):
            resolve(quantization="int8")
        with pytest.raises(ConfigError, match=r"needs the C\+\+ kernels of the CPU, .*KERNELS=0"):
            resolve(lm_head_quantization="int8")
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantization": "gptq"},
            "on the device 'hpu'; available: fp8, inc, int8, int4, bitsandbytes",
        ),
        ({"lm_head_quantization": "int8"}, "are not in use here .device 'hpu'"),
    ],
)
def test_a_card_has_other_ones(monkeypatch, settings, message):
    monkeypatch.setenv("VLLM_HPU_SIM", "gaudi2")
    envs.get.cache_clear()
    resolve_platform.cache_clear()
    try:
        with pytest.raises(ConfigError, match=message):
            resolve(**settings, device="hpu")
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()
        resolve_platform.cache_clear()


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    model = write_model(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert resolve(model=model, quantization="awq").model.quantization == "awq"
    with pytest.raises(ConfigError, match="is quantized already, with 'awq'"):
        resolve(model=model, quantization="int8")


def test_a_quantized_checkpoint_of_float16_runs_in_bfloat16_unless_asked(tmp_path):
    settings = {"quant_method": "gptq", "bits": 4}
    model = write_model(tmp_path, quantization_config=settings, torch_dtype="float16")
    assert resolve(model=model).model.dtype_name == "bfloat16"
    assert resolve(model=model, dtype="half").model.dtype_name == "float16"
    assert resolve(model=model, quantization="gptq_hpu").model.quantization == "gptq_hpu"


@pytest.mark.parametrize("settings", [{"bits": 4}, {"quant_method": 4}])
def test_a_checkpoint_that_does_not_say_how_it_is_quantized_is_refused(tmp_path, settings):
    model = write_model(tmp_path, quantization_config=settings)
    with pytest.raises(ConfigError, match="must be an object with the string quant_method"):
        resolve(model=model, quantization="gptq")
