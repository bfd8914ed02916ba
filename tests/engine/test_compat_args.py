"""Test the arguments of the Gaudi fork that are not fields of our configs."""

import json
from collections import namedtuple

import pytest

from tests.loops import loop_over
from vllm.config import VllmConfig
from vllm.config.fields import config_fields, config_sections
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.resolve.compat_args import COMPAT_ARGUMENTS
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser


def parse(*flags: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm test"))
    return EngineArgs.from_cli_args(parser.parse_args(flags))


IGNORED = [name for name, argument in COMPAT_ARGUMENTS.items() if argument.available]
Level = namedtuple("Level", "level")
"""Stands for the fork's CompilationConfig."""
MISSING = [name for name, argument in COMPAT_ARGUMENTS.items() if not argument.available]


VALUES = {
    "compilation_config": {"level": 3, "use_cudagraph": True},
}
"""Values for arguments that accept only some values."""


@loop_over("name", [name for name in IGNORED if name != "enable_reasoning"])
def test_an_argument_without_effect_is_accepted_with_one_line(name, capsys):
    value, reason = VALUES.get(name, True), COMPAT_ARGUMENTS[name].reason
    assert EngineArgs(**{name: value}) == EngineArgs()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING ")
    assert line.endswith(f"] {name}={value} has no effect: {reason}")


def test_reasoning_is_enabled_with_a_parser_only():
    assert EngineArgs(enable_reasoning=True, reasoning_parser="qwen3") == EngineArgs()
    with pytest.raises(ConfigError, match=r"^enable_reasoning=True needs reasoning_parser"):
        EngineArgs(enable_reasoning=True)


@loop_over("name", COMPAT_ARGUMENTS)
def test_an_argument_of_the_fork_that_is_none_says_nothing(name, capsys):
    assert EngineArgs(**{name: None}) == EngineArgs()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_feature_is_refused_when_asked_for(name):
    with pytest.raises(ConfigError, match=f"^{name}='something': .*this version.*Leave it out"):
        EngineArgs(**{name: "something"})


@loop_over("name", COMPAT_ARGUMENTS)
def test_a_reason_is_no_promise_and_no_sentence_of_its_own(name):
    reason = COMPAT_ARGUMENTS[name].reason
    assert reason.strip() == reason
    assert not reason.endswith(".")
    assert " yet" not in reason


@pytest.mark.parametrize("level", [0, 3, "3", '{"level": 2}', {"level": 1}, {}, Level(3)])
def test_every_level_of_compilation_is_taken(level):
    assert EngineArgs(compilation_config=level) == EngineArgs()


@pytest.mark.parametrize("level", [4, -1, "fast", '{"level": "3"}', [3]])
def test_another_level_of_compilation_is_refused(level):
    with pytest.raises(ConfigError, match="compilation_config must be a level from 0 to 3 or"):
        EngineArgs(compilation_config=level)


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
        "--cuda-graph-sizes", "1", "2", "--num-lookahead-slots", "8", "--seed", "1",
    )  # fmt: skip
    assert args == EngineArgs(seed=1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1].split("=")[0] for line in lines] == [
        "swap_space", "use_v2_block_manager", "disable_log_requests", "compilation_config",
        "cuda_graph_sizes", "num_lookahead_slots",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ["--enable-prompt-adapter"],
        ["--data-parallel-backend", "ray"],
    ],
)
def test_flags_of_missing_features_are_refused(flags):
    with pytest.raises(ConfigError, match="not available in this version"):
        parse(*flags)


@pytest.mark.parametrize("flag", ["--num-scheduler-steps", "--num-scheduler-seqs"])
def test_several_steps_may_be_asked_for_as_earlier_versions_of_the_fork_wrote_it(flag, capsys):
    assert parse(flag, "8") == EngineArgs(num_scheduler_steps=8)
    assert capsys.readouterr().err == ""


def test_speculation_may_be_written_as_earlier_versions_of_the_fork_did():
    args = parse(
        "--speculative_model", "[ngram]", "--num_speculative_tokens", "5",
        "--ngram-prompt-lookup-max", "4", "--speculative-config", '{"method": "ngram"}',
    )  # fmt: skip
    assert args.speculative_config == {
        "method": "ngram",
        "model": "[ngram]",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    }


def test_rope_arguments_go_into_the_overrides():
    scaling = {"rope_type": "linear", "factor": 2.0}
    args = EngineArgs(rope_scaling=scaling, rope_theta=5e5, hf_overrides={"a": 1})
    assert args.hf_overrides == {"a": 1, "rope_scaling": scaling, "rope_theta": 5e5}
    flags = ["--rope-scaling", json.dumps(scaling), "--rope-theta", "5e5"]
    assert parse(*flags, "--hf-overrides", '{"a": 1}') == args
    assert EngineArgs(rope_scaling={}, rope_theta=None).hf_overrides == {}
