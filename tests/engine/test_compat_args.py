"""Arguments of the Gaudi fork that are not fields of our configs."""

import json

import pytest

from vllm.config import VllmConfig
from vllm.config.fields import config_fields, config_sections
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.compat_args import COMPAT_ARGUMENTS
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser


def parse(*flags: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm test"))
    return EngineArgs.from_cli_args(parser.parse_args(flags))


IGNORED = [name for name, argument in COMPAT_ARGUMENTS.items() if argument.available]
MISSING = [name for name, argument in COMPAT_ARGUMENTS.items() if not argument.available]


@pytest.mark.parametrize("name", IGNORED)
def test_an_argument_without_effect_is_accepted_with_one_line(name, capsys):
    argument = COMPAT_ARGUMENTS[name]
    value = True if argument.read is None else {}
    assert EngineArgs(**{name: value}) == EngineArgs()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING ")
    assert line.endswith(f"] {name}={value} has no effect: {argument.reason}")


@pytest.mark.parametrize("name", COMPAT_ARGUMENTS)
def test_an_argument_of_the_fork_that_is_none_says_nothing(name, capsys):
    assert EngineArgs(**{name: None}) == EngineArgs()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_feature_is_refused_when_asked_for(name):
    with pytest.raises(ConfigError, match=f"^{name}='something': .*this version.*Leave it out"):
        EngineArgs(**{name: "something"})


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_feature_may_be_switched_off(name, capsys):
    argument = COMPAT_ARGUMENTS[name]
    for off in (argument.off, *argument.also_off):
        assert EngineArgs(**{name: off}) == EngineArgs()
    assert capsys.readouterr().err == ""


def test_arguments_of_the_fork_are_no_fields():
    assert COMPAT_ARGUMENTS.keys().isdisjoint(
        f.name for s in config_sections(VllmConfig).values() for f in config_fields(s)
    )


def test_flags_of_the_fork_are_accepted(capsys):
    args = parse(
        "--swap-space", "4", "--use-v2-block-manager", "--disable_log_requests", "-O3",
        "--cuda-graph-sizes", "1", "2", "--num-scheduler-steps", "8", "--seed", "1",
    )  # fmt: skip
    assert args == EngineArgs(seed=1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1].split("=")[0] for line in lines] == [
        "swap_space", "use_v2_block_manager", "disable_log_requests", "compilation_config",
        "cuda_graph_sizes", "num_scheduler_steps",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ["--enable-lora"],
        ["--cpu-offload-gb", "1.5"],
        ["--speculative-config", '{"model": "x"}'],
    ],
)
def test_flags_of_missing_features_are_refused(flags):
    with pytest.raises(ConfigError, match="not available in this version"):
        parse(*flags)


@pytest.mark.parametrize("text", ["image=1", "image=1,video=0", '{"image": 1}'])
def test_limits_of_inputs_may_be_written_in_two_ways(text, capsys):
    assert parse("--limit-mm-per-prompt", text) == EngineArgs()
    assert "limit_mm_per_prompt={'image': 1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["image", "image=", "image=one", '{"image": "1"}', "[1]", "{"])
def test_other_ways_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        parse("--limit-mm-per-prompt", text)
    assert "must be like image=1,video=0 or" in capsys.readouterr().err


def test_rope_arguments_go_into_the_overrides():
    scaling = {"rope_type": "linear", "factor": 2.0}
    args = EngineArgs(rope_scaling=scaling, rope_theta=5e5, hf_overrides={"a": 1})
    assert args.hf_overrides == {"a": 1, "rope_scaling": scaling, "rope_theta": 5e5}
    flags = ["--rope-scaling", json.dumps(scaling), "--rope-theta", "5e5"]
    assert parse(*flags, "--hf-overrides", '{"a": 1}') == args
    assert EngineArgs(rope_scaling={}, rope_theta=None).hf_overrides == {}
