"""Test the settings of Gaudi that environment variables give."""

from dataclasses import replace

import pytest

from tests.engine.fakes import make_config
from tests.hpu import captured_log, simulated_hpu
from tests.loops import loop_over
from vllm import envs
from vllm.config.hpu import HPUConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.engine.resolve.hpu import (
    check_launcher,
    resolve_hpu_config,
    warn_of_idle_variables,
)
from vllm.errors import ConfigError


@pytest.fixture
def resolve(monkeypatch):
    """Return the config with these environment variables and no others."""

    def resolve_with(*, has_slices=True, **variables):
        monkeypatch.setattr(envs.os, "environ", variables)
        envs.get.cache_clear()
        return resolve_hpu_config(HPUConfig(), has_slices=has_slices)

    yield resolve_with
    monkeypatch.undo()
    envs.get.cache_clear()


def test_without_variables_everything_has_its_default(resolve):
    assert resolve() == HPUConfig(contiguous_pa=True)


@loop_over(
    "variables, expected",
    [
        ({"VLLM_BUCKETING_STRATEGY": "lin"}, {"bucketing_strategy": "linear"}),
        ({"VLLM_BUCKETING_STRATEGY": "exp"}, {"bucketing_strategy": "exponential"}),
        ({"VLLM_BUCKETING_STRATEGY": "Sparse"}, {"bucketing_strategy": "sparse"}),
        ({"VLLM_EXPONENTIAL_BUCKETING": "t"}, {"bucketing_strategy": "exponential"}),
        ({"VLLM_EXPONENTIAL_BUCKETING": "false"}, {"bucketing_strategy": "linear"}),
        ({"VLLM_BUCKETING_FROM_FILE": "b.txt"}, {"bucketing_file": "b.txt"}),
        (
            {"VLLM_DECODE_BLOCK_BUCKET_MAX": "512", "VLLM_PROMPT_BS_BUCKET_MIN": "2"},
            {
                "bucket_variables": (
                    ("VLLM_PROMPT_BS_BUCKET_MIN", 2),
                    ("VLLM_DECODE_BLOCK_BUCKET_MAX", 512),
                )
            },
        ),
        ({"VLLM_MERGED_PREFILL": "1"}, {"merged_prefill": True}),
        ({"VLLM_SKIP_WARMUP": "true"}, {"skip_warmup": True}),
        ({"VLLM_FULL_WARMUP": "on"}, {"full_warmup": True}),
        ({"VLLM_GRAPH_RESERVED_MEM": "0.4"}, {"graph_reserved_mem": 0.4}),
        ({"VLLM_GRAPH_PROMPT_RATIO": "0"}, {"graph_prompt_ratio": 0.0}),
        ({"VLLM_GRAPH_PROMPT_STRATEGY": "max_bs"}, {"graph_prompt_strategy": "max_bs"}),
        ({"VLLM_GRAPH_DECODE_STRATEGY": "min_tokens"}, {"graph_decode_strategy": "min_tokens"}),
        ({"VLLM_CONTIGUOUS_PA": "1"}, {"contiguous_pa": True}),
        ({"VLLM_PROMPT_USE_FUSEDSDPA": "0"}, {"prompt_attention": "naive"}),
        (
            {"VLLM_PROMPT_USE_FUSEDSDPA": "0", "VLLM_PROMPT_USE_FLEX_ATTENTION": "1"},
            {"prompt_attention": "flex"},
        ),
        ({"VLLM_CONFIG_HIDDEN_LAYERS": "4"}, {"hidden_layers_per_graph": 4}),
        ({"VLLM_REGIONAL_COMPILATION": "0"}, {"regional_compilation": False}),
        ({"VLLM_T_COMPILE_FULLGRAPH": "1"}, {"compile_fullgraph": True}),
        ({"VLLM_T_COMPILE_DYNAMIC_SHAPES": "1"}, {"compile_dynamic_shapes": True}),
        ({"VLLM_GC_THR_MULTIPLIER": "2"}, {"gc_thresholds": (1400, 20, 20)}),
        ({"VLLM_GC_THR_MULTIPLIER": "2147483647"}, {"gc_thresholds": (2**31 - 1,) * 3}),
        ({"VLLM_GC_THR_GEN1": "7"}, {"gc_thresholds": (700, 7, 10)}),
        ({"VLLM_GC_THR_GEN0": "0", "VLLM_GC_THR_MULTIPLIER": "2"}, {"gc_thresholds": (0, 10, 10)}),
        ({"VLLM_HPU_LOG_STEP_GRAPH_COMPILATION": "1"}, {"log_compilations": "some"}),
        ({"VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL": "1"}, {"log_compilations": "all"}),
        ({"VLLM_HPU_LOG_STEP_CPU_FALLBACKS": "1"}, {"log_cpu_fallbacks": "some"}),
        (
            {"VLLM_HPU_LOG_STEP_CPU_FALLBACKS": "1", "VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL": "1"},
            {"log_cpu_fallbacks": "all"},
        ),
    ],
)
def test_a_variable_arrives_in_its_field_and_nowhere_else(resolve, variables, expected):
    assert resolve(**variables) == HPUConfig(**{"contiguous_pa": True, **expected})


@pytest.mark.parametrize(
    ("has_slices", "given", "expected"),
    [(True, None, True), (False, None, False), (True, "0", False), (False, "1", True)],
)
def test_decode_reads_a_slice_where_blocks_can_be_kept_together(
    resolve, has_slices, given, expected
):
    variables = {} if given is None else {"VLLM_CONTIGUOUS_PA": given}
    assert resolve(has_slices=has_slices, **variables).contiguous_pa is expected


@pytest.mark.parametrize(
    ("strategy", "exponential", "runs", "warnings"),
    [
        ("sparse", "1", "exponential", 1),
        ("exp", "0", "linear", 1),
        ("exp", "1", "exponential", 0),
        ("lin", "1", "exponential", 1),
        ("", "1", "exponential", 0),
    ],
)
def test_the_older_switch_of_the_strategy_wins(
    resolve, capsys, strategy, exponential, runs, warnings
):
    config = resolve(VLLM_BUCKETING_STRATEGY=strategy, VLLM_EXPONENTIAL_BUCKETING=exponential)
    assert config.bucketing_strategy == runs
    line = f"VLLM_EXPONENTIAL_BUCKETING={exponential} overrides VLLM_BUCKETING_STRATEGY={strategy}"
    assert capsys.readouterr().err.count(line) == warnings


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VLLM_PA_SOFTMAX_IMPL", "wsum,x", "VLLM_PA_SOFTMAX_IMPL: 'x' is unknown; accepted: amax"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/recipes,8192", "expected `path,delete at start,size in"),
    ],
)
def test_a_wrong_value_is_found_before_the_weights_are_read(resolve, name, value, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**{name: value})


def test_a_prompt_has_one_kind_of_attention(resolve):
    with pytest.raises(ConfigError, match="needs VLLM_PROMPT_USE_FUSEDSDPA=0"):
        resolve(VLLM_PROMPT_USE_FLEX_ATTENTION="1")


@pytest.mark.parametrize("is_lazy", [True, False])
def test_flex_attention_is_refused_on_a_simulated_card(is_lazy):
    switches = {"VLLM_PROMPT_USE_FUSEDSDPA": 0, "VLLM_PROMPT_USE_FLEX_ATTENTION": 1}
    message = r"cannot run on a simulated card.* Unset it\. VLLM_PROMPT_USE_FUSEDSDPA=0 then"
    with simulated_hpu(PT_HPU_LAZY_MODE=is_lazy, **switches):
        with pytest.raises(ConfigError, match=message):
            EngineArgs(device="hpu").create_engine_config()
        assert EngineArgs(device="cpu").create_engine_config().hpu.prompt_attention == "flex"


def test_a_feature_that_would_change_the_weights_is_refused(resolve):
    message = "VLLM_USE_MODELSCOPE is not supported in this version: models .*. Unset it"
    with pytest.raises(ConfigError, match=message):
        resolve(VLLM_USE_MODELSCOPE="1")


def test_an_engine_does_not_start_with_it(monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_MODELSCOPE is not supported"):
        EngineArgs().create_engine_config()


def test_buckets_are_not_left_for_later_where_nothing_warms_them_up():
    config = make_config()
    external = replace(config.parallel, distributed_executor_backend="external_launcher")
    for ready_when in ("all", None):
        hpu = replace(config.hpu, ready_when=ready_when)
        check_launcher(replace(config, parallel=external, hpu=hpu))
    first = replace(config, hpu=replace(config.hpu, ready_when="first"))
    check_launcher(first)
    with pytest.raises(ConfigError, match="ready_when='first' cannot be used with"):
        check_launcher(replace(first, parallel=external))


def test_an_offline_engine_does_not_follow_its_traffic():
    with pytest.raises(ConfigError, match="adapt_buckets=True works only in a server"):
        LLMEngine.from_engine_args(EngineArgs(adapt_buckets=True))


@pytest.mark.parametrize(
    "variables",
    [{"VLLM_PROMPT_SEQ_BUCKET_MIN": "1000000000"}, {"VLLM_PROMPT_BS_BUCKET_MIN": "100000"}],
    ids=str,
)
def test_prompt_buckets_of_nothing_but_padding_are_refused(variables):
    with (
        simulated_hpu(**variables),
        pytest.raises(ConfigError, match=r"prompt bucket has \d+ tokens, but .* at most 8192"),
    ):
        EngineArgs().create_engine_config()


def test_a_full_warm_up_cannot_be_left_out(resolve):
    with pytest.raises(ConfigError, match=r"VLLM_SKIP_WARMUP=true leaves the warm-up out. Unset"):
        resolve(VLLM_FULL_WARMUP="1", VLLM_SKIP_WARMUP="1")


@pytest.mark.parametrize(
    ("variables", "is_eager", "named"),
    [
        ({"VLLM_BUCKETING_FROM_FILE": "b", "VLLM_PROMPT_BS_BUCKET_MAX": "4"}, False, ["PROMPT_BS"]),
        ({"VLLM_BUCKETING_FROM_FILE": "b", "VLLM_EXPONENTIAL_BUCKETING": "1"}, False, ["EXPON"]),
        (
            {"VLLM_PROMPT_USE_FUSEDSDPA": "0", "VLLM_HPU_FSDPA_SLICE_ENABLED": "1"},
            False,
            ["HPU_FSDPA_SLICE_ENABLED"],
        ),
        ({"VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE": "512"}, False, ["HPU_FSDPA_SLICE_CHUNK_SIZE"]),
        (
            {"VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE": "512", "VLLM_HPU_FSDPA_SLICE_ENABLED": "1"},
            False,
            [],
        ),
        ({"VLLM_SOFTMAX_CONST_NORM_VALUE": "5"}, False, ["SOFTMAX_CONST_NORM_VALUE"]),
        ({"VLLM_SOFTMAX_CONST_NORM_VALUE": "5", "VLLM_SOFTMAX_CONST_NORM": "1"}, False, []),
        (
            {"VLLM_FUSED_BLOCK_SOFTMAX": "1", "VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT": "0"},
            False,
            ["FUSED_BLOCK_SOFTMAX"],
        ),
        ({"VLLM_T_COMPILE_FULLGRAPH": "1", "PT_HPU_LAZY_MODE": "1"}, False, ["T_COMPILE"]),
        ({"VLLM_T_COMPILE_FULLGRAPH": "0", "PT_HPU_LAZY_MODE": "1"}, False, []),
        ({"VLLM_GRAPH_PROMPT_RATIO": "1", "PT_HPU_LAZY_MODE": "0"}, False, ["GRAPH_PROMPT_RATIO"]),
        ({"VLLM_GRAPH_PROMPT_RATIO": "1"}, False, []),
        ({"VLLM_GRAPH_RESERVED_MEM": "0.5"}, True, ["GRAPH_RESERVED_MEM"]),
        ({"VLLM_CONFIG_HIDDEN_LAYERS": "4", "PT_HPU_LAZY_MODE": "0"}, False, ["CONFIG_HIDDEN"]),
        ({"VLLM_GRAPH_PROMPT_STRATEGY": "max_bs"}, False, []),
        (
            {"VLLM_GRAPH_PROMPT_STRATEGY": "max_bs", "VLLM_SKIP_WARMUP": "1"},
            False,
            ["GRAPH_PROMPT_STRATEGY=max_bs"],
        ),
        (
            {"VLLM_HPU_SIM_STRICT": "1", "VLLM_HPU_SIM_ABSENT": "metrics"},
            False,
            ["HPU_SIM_STRICT=1", "HPU_SIM_ABSENT=metrics"],
        ),
        ({"VLLM_HPU_SIM_STRICT": "1", "VLLM_HPU_SIM": "gaudi2"}, False, []),
    ],
    ids=str,
)
def test_a_variable_that_others_leave_without_effect_is_named(resolve, variables, is_eager, named):
    config = resolve(**variables)
    with captured_log() as log:
        warn_of_idle_variables(config, is_eager=is_eager)
    assert len(log) == len(named)
    for line, name in zip(log, named, strict=True):
        assert line.startswith(f"VLLM_{name}") and " has no effect: " in line
