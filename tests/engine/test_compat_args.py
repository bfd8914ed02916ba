"""Test arguments of the Gaudi fork, and of newer releases, that are not fields of our configs."""

import json
import shlex
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
    "model_loader_extra_config": {"enable_multithread_load": True},
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


NEWER: dict[str, dict[str, object]] = {
    "--structured-outputs-config.backend xgrammar": {"guided_decoding_backend": "xgrammar"},
    """--structured-outputs-config '{"backend": "guidance", "disable_any_whitespace": true}'""": {
        "guided_decoding_backend": "guidance",
        "guided_decoding_disable_any_whitespace": True,
    },
    "--guided-decoding-backend auto --structured-outputs-config.disable_fallback true": {
        "guided_decoding_disable_fallback": True
    },
    """--pooler-config '{"pooling_type": "LAST"}'""": {
        "override_pooler_config": {"pooling_type": "LAST"}
    },
    "--kv-cache-memory 10G": {"kv_cache_memory_bytes": 10 * 2**30},
    "--language-model-only": {"limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0}},
    "--no-language-model-only": {},
    "--limit-mm-per-prompt.video 0 --limit-mm-per-prompt.image=2": {
        "limit_mm_per_prompt": {"video": 0, "image": 2}
    },
    """--speculative-config '{"method": "mtp"}' --speculative_config.num_speculative_tokens 3""": {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3}
    },
    "--hf-overrides.text_config.rope_parameters.factor 4.0": {
        "hf_overrides": {"text_config": {"rope_parameters": {"factor": 4.0}}}
    },
    "--max-model-len auto": {},
    "--max-model-len -1": {},
    "--load-format runai_streamer": {"load_format": "safetensors"},
    "--load-format fastsafetensors": {"load_format": "safetensors"},
    "--tokenizer-mode hf": {},
    "--prefix-caching-hash-algo sha256_cbor": {},
    "--tokenizer_mode mistral --config_format mistral --load_format mistral": {
        "tokenizer_mode": "mistral",
        "load_format": "mistral",
    },
}
"""Flags of newer releases that mean other flags, or nothing, and what they mean."""


@loop_over("flags", NEWER)
def test_flags_of_newer_releases_are_translated(flags, capsys):
    assert parse(*shlex.split(flags)) == EngineArgs(**NEWER[flags])
    assert capsys.readouterr().err == ""


@loop_over(
    "flags",
    [
        "--mamba-ssm-cache-dtype float32",
        "--mm-encoder-tp-mode data --stream-interval 20",
        "--enable-eplb --eplb-config.window_size 1000",
        "--attention-config.backend FLASH_ATTN --moe-backend triton",
        "-O.mode=3",
        "-cc.cudagraph_mode=FULL_AND_PIECEWISE -cc.pass_config.fuse_allreduce_rms true",
        "--cudagraph-capture-sizes 1 2 4",
        """--model-loader-extra-config '{"enable_multithread_load": true}'""",
    ],
)
def test_flags_of_newer_releases_without_effect_do_not_stop_a_start(flags, capsys):
    assert parse(*shlex.split(flags)) == EngineArgs()
    assert "has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"structured_outputs_config": {"backnd": 1}},
            "has the key 'backnd'; accepted are backend",
        ),
        ({"structured_outputs_config": {"enable_in_reasoning": True}}, "must be false or empty"),
        ({"structured_outputs_config": "xgrammar"}, "must be a JSON object"),
        ({"model_loader_extra_config": {"pattern": "x"}}, "has the key 'pattern', which chooses"),
        ({"logprobs_mode": "processed_logprobs"}, "follow from the logits before temperature"),
        ({"default_mm_loras": {"audio": "x"}}, "only the language model has adapters"),
    ],
)
def test_arguments_of_newer_releases_that_change_results_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**settings)


def test_a_key_of_a_flag_needs_a_value(capsys):
    with pytest.raises(SystemExit):
        parse("--speculative-config.method")
    assert "--speculative-config.method must be followed by a value" in capsys.readouterr().err


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
