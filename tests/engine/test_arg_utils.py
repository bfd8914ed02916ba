"""Test engine arguments as keywords and as flags, and the config that they resolve to."""

import json
from dataclasses import asdict, fields

import pytest

from vllm.assets import BUNDLED_MODEL
from vllm.config import VllmConfig
from vllm.config.fields import config_fields, config_sections
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser

SETTINGS = [f for s in config_sections(VllmConfig).values() for f in config_fields(s)]
BUNDLED_CONFIG = json.loads((BUNDLED_MODEL / "config.json").read_text())


def parse(*flags: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm test"))
    return EngineArgs.from_cli_args(parser.parse_args(flags))


# ---- keywords ---------------------------------------------------------------------------------


def test_arguments_are_the_fields_of_the_config_classes():
    assert [f.name for f in fields(EngineArgs)] == [f.name for f in SETTINGS]
    assert asdict(EngineArgs()) == {f.name: f.default for f in SETTINGS}


def test_the_model_may_be_given_by_position():
    assert EngineArgs("/m") == EngineArgs(model="/m")
    with pytest.raises(TypeError):
        EngineArgs("/m", "/tokenizer")


def test_none_means_not_given():
    assert EngineArgs(**{f.name: None for f in SETTINGS}) == EngineArgs()


def test_arguments_survive_a_round_trip_through_a_dict():
    args = EngineArgs("/m", max_model_len="2k", hf_overrides={"a": {"b": 1}}, ignore_patterns="*.x")
    assert EngineArgs(**asdict(args)) == args
    assert args.max_model_len == 2000
    assert args.ignore_patterns == ("*.x",)


def test_two_engine_args_share_no_dict():
    first, second = EngineArgs(), EngineArgs()
    first.hf_overrides["a"] = 1
    assert second.hf_overrides == {}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_modl_len", "max_model_len"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("enable_lorra", "enable_lora"),
        ("rope_scalling", "rope_scaling"),
    ],
)
def test_an_unknown_keyword_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(ConfigError) as failure:
        EngineArgs(**{name: 1})
    assert str(failure.value) == f"unknown engine argument {name!r}; did you mean {nearest!r}?"


def test_a_keyword_like_nothing_known_is_just_unknown():
    with pytest.raises(ConfigError) as failure:
        EngineArgs(xyzzy=1)
    assert str(failure.value) == "unknown engine argument 'xyzzy'"


def test_a_wrong_type_is_an_error_that_names_the_argument():
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer, got 'many'"):
        EngineArgs(max_num_seqs="many")


# ---- flags ------------------------------------------------------------------------------------


def test_without_flags_everything_has_its_default():
    assert parse() == EngineArgs()


def test_every_argument_has_a_flag():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    help = parser.format_help()
    for setting in SETTINGS:
        assert f"\n  {setting.flag}" in help
    flags = vars(parser.parse_args([]))
    assert flags == {f.name: f.default for f in SETTINGS}


@pytest.mark.parametrize("flag", ["--max-model-len", "--max_model_len", "--max-model_len"])
def test_dashes_and_underscores_are_the_same(flag):
    assert parse(flag, "100").max_model_len == 100
    assert parse(f"{flag}=100").max_model_len == 100


def test_underscores_in_values_stay():
    assert parse("--model=my_model", "--tokenizer", "a_b").model == "my_model"
    assert parse("--hf_overrides", '{"a_b": 1}').hf_overrides == {"a_b": 1}


@pytest.mark.parametrize(("text", "value"), [("8k", 8000), ("8K", 8192), ("1M", 2**20)])
def test_numbers_of_tokens_take_units(text, value):
    assert parse("--max-model-len", text).max_model_len == value
    assert parse("--max-num-batched-tokens", text).max_num_batched_tokens == value


def test_switches_have_both_forms():
    assert parse("--no-enable-prefix-caching").enable_prefix_caching is False
    assert parse("--enable_prefix_caching").enable_prefix_caching is True
    assert parse("--enforce-eager").enforce_eager is True


def test_several_values_make_a_tuple():
    assert parse("--ignore-patterns", "*.bin", "*.pt").ignore_patterns == ("*.bin", "*.pt")


def test_short_flags():
    assert parse("-tp", "1", "-pp=1").tensor_parallel_size == 1
    several = parse("-dp", "4", "-dpl", "2", "-dpr=1", "-dpa", "10.0.0.5", "-dpp", "29551")
    assert (several.data_parallel_size, several.data_parallel_size_local) == (4, 2)
    assert several.data_parallel_start_rank == 1
    assert several.data_parallel_address == "10.0.0.5"
    assert several.data_parallel_rpc_port == 29551


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-modl-len", "5"], "unrecognized argument: --max-modl-len (did you mean --max-mode"),
        (["--seeds=5", "--zzz"], "arguments: --seeds (did you mean --seed?), --zzz"),
        (["stray"], "unrecognized argument: stray"),
        (["--max-model", "5"], "unrecognized argument: --max-model (did you mean --max-model-len"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--max-num-seqs", "8k"], "argument --max-num-seqs: must be an integer, got '8k'"),
        (
            ["--hf-overrides", '{"a" 1}'],
            "--hf-overrides: must be a JSON object: Expecting ':' delimiter at character 6 of",
        ),
        (["--hf-overrides", "[]"], "--hf-overrides: must be a JSON object (a dict), got []"),
        (["--rope-scaling", "linear"], "must be a JSON object: Expecting value at character 1"),
    ],
)
def test_a_bad_flag_exits_with_two_lines_and_code_2(flags, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(*flags)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.endswith("\n(see 'vllm test --help')\n")
    assert error.count("\n") == 2


def test_flags_of_other_owners_are_left_alone():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--prompt")
    args = EngineArgs.from_cli_args(parser.parse_args(["--prompt", "x", "--seed", "3"]))
    assert args == EngineArgs(seed=3)


def test_a_flag_may_have_a_text_or_nothing():
    assert parse("--hf-token", "hf_x").hf_token == "hf_x"
    assert parse("--hf-token").hf_token is True
    assert parse().hf_token is None
