"""Test the config that engine arguments give for a model and this machine."""

import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

from tests.hpu import simulated_hpu
from tests.loops import loop_over
from vllm import envs
from vllm.assets import BUNDLED_MODEL
from vllm.config import LoadConfig, VllmConfig
from vllm.config.fields import config_fields, config_sections
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.resolve.config import RESOLVERS
from vllm.errors import ConfigError
from vllm.platforms import Platform
from vllm.transformers_utils.generation_config import load_generation_defaults
from vllm.transformers_utils.hf_config import is_known_to_transformers

BUNDLED_CONFIG = json.loads((BUNDLED_MODEL / "config.json").read_text())


def resolve(**settings: Any) -> VllmConfig:
    return EngineArgs(**settings).create_engine_config()


def write_model(folder: Path, **changes: Any) -> str:
    """Write a model folder with the changed config of the bundled model, and without weights."""
    (folder / "config.json").write_text(json.dumps({**BUNDLED_CONFIG, **changes}))
    return str(folder)


def test_the_default_config_is_complete():
    config = resolve()
    assert config.model.model == config.model.path == config.model.tokenizer == str(BUNDLED_MODEL)
    assert config.model.served_model_name == ("stdlib-llama-5m",)
    assert config.model.arch.architecture == "LlamaForCausalLM"
    assert config.model.dtype == "bfloat16"
    assert config.model.max_model_len == config.scheduler.max_model_len == 2048
    assert config.device.device == "cpu"
    assert config.cache.block_size == 16
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 2048)
    assert config.cache.kv_cache_memory_bytes is None


@pytest.mark.parametrize(
    ("whole", "text", "has_head", "is_tied"),
    [
        (True, False, True, False),
        (True, True, True, False),
        (None, False, True, False),
        (False, True, False, True),
        (True, None, False, True),
    ],
)
def test_the_files_of_a_multimodal_model_decide_if_its_head_is_tied(
    tmp_path, whole, text, has_head, is_tied
):
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {**BUNDLED_CONFIG, "tie_word_embeddings": text},
        "tie_word_embeddings": whole,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = {"language_model.lm_head.weight": torch.zeros(1)} if has_head else {}
    table = {"language_model.model.embed_tokens.weight": torch.ones(1)}
    save_file(table | head, tmp_path / "model.safetensors")
    arch = resolve(model=str(tmp_path), skip_tokenizer_init=True).model.resolved_arch
    assert arch.tie_word_embeddings == is_tied


def test_what_is_said_about_observability_arrives():
    config = resolve(disable_log_stats=True, kv_events_config={"topic": "x"})
    assert config.observability.disable_log_stats
    assert config.observability.kv_events.topic == "x"


def test_making_a_config_changes_nothing():
    args = EngineArgs(max_model_len=100)
    before = asdict(args)
    first, second = args.create_engine_config(), args.create_engine_config()
    assert first == second
    assert asdict(args) == before
    with pytest.raises(FrozenInstanceError):
        first.model.dtype = "float32"


def test_given_values_arrive_in_their_config():
    config = resolve(
        model=str(BUNDLED_MODEL),
        block_size=32,
        max_num_seqs=3,
        max_num_batched_tokens=77,
        seed=5,
        load_format="dummy",
        dtype="half",
        served_model_name="me",
    )
    assert config.cache.block_size == 32
    assert config.scheduler.max_num_seqs == 3
    assert config.scheduler.max_num_batched_tokens == 77
    assert config.model.seed == 5
    assert config.load.load_format == "dummy"
    assert config.model.dtype == "float16"
    assert config.model.served_model_name == ("me",)


def test_a_step_holds_all_requests_by_default():
    assert resolve(max_num_seqs=10_000).scheduler.max_num_batched_tokens == 10_000
    assert resolve(max_num_batched_tokens=64).scheduler.max_num_seqs == 64


def test_without_chunked_prefill_a_step_holds_the_longest_prompt(tmp_path):
    model = write_model(tmp_path, max_position_embeddings=9000)
    config = resolve(model=model, enable_chunked_prefill=False)
    assert config.scheduler.max_num_batched_tokens == 9000
    assert resolve(model=model).scheduler.max_num_batched_tokens == 2048


def test_a_length_beyond_the_model_names_both_numbers_and_the_way_out():
    with pytest.raises(ConfigError) as failure:
        resolve(max_model_len=4096)
    message = str(failure.value)
    assert message.startswith(
        "max_model_len=4096: config.json of the model allows at most 2048 tokens"
    )
    assert """hf_overrides='{"max_position_embeddings": 4096}'""" in message
    overridden = resolve(max_model_len=4096, hf_overrides={"max_position_embeddings": 4096})
    assert overridden.scheduler.max_model_len == 4096


def test_weights_are_not_downloaded_for_settings_that_are_wrong(monkeypatch):
    asked = []

    def find(name, revision, download_dir, ignore_patterns, load_format, token):
        asked.append((name, load_format))
        return BUNDLED_MODEL

    monkeypatch.setattr("vllm.engine.resolve.config.resolve_model_folder", find)
    for wrong in ({"max_model_len": 4096}, {"quantization": "x"}, {"max_num_batched_tokens": 0}):
        with pytest.raises(ConfigError):
            resolve(model="some/model", **wrong)
    assert ("some/model", "auto") not in asked
    assert resolve(model="some/model").model.path == str(BUNDLED_MODEL)
    assert asked[-1] == ("some/model", "auto")


@pytest.fixture
def allow_long(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    envs.get.cache_clear()
    yield
    envs.get.cache_clear()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 1.7},
        {"rope_type": "dynamic", "factor": 3.3},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
)
def test_a_length_beyond_the_model_may_be_allowed(tmp_path, allow_long, capsys, rope):
    folder = write_model(tmp_path, rope_scaling={**rope, "rope_theta": 10000.0})
    usual, long = resolve(model=folder), resolve(model=folder, max_model_len=54321)
    assert long.scheduler.max_model_len == long.model.max_model_len == 54321
    # There is a position for every token, and the parameters of the rotary embedding have not
    # changed.
    assert 54321 <= long.model.arch.derived_max_model_len < 54321 * 1.001
    assert long.model.arch.rope == usual.model.arch.rope
    (line,) = capsys.readouterr().err.splitlines()
    assert f"max_model_len (54321) is more than the {usual.model.max_model_len} tokens" in line


def test_a_length_within_the_model_stays_as_it_is(allow_long, capsys):
    assert resolve(max_model_len=100).model.arch == resolve().model.arch
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0,
                              "original_max_position_embeddings": 2048}},
            "The factor of its rope_scaling sets the length",
        ),
        (
            {"architectures": ["OPTForCausalLM"], "model_type": "opt", "rope_theta": None},
            "Its position embedding is learned",
        ),
    ],
)  # fmt: skip
def test_a_length_the_model_has_no_positions_for_is_never_allowed(
    tmp_path, allow_long, changes, cause
):
    with pytest.raises(ConfigError, match=f"{cause}, so VLLM_ALLOW_LONG_MAX_MODEL_LEN cannot"):
        resolve(model=write_model(tmp_path, **changes), max_model_len=54321)


def test_a_model_without_positions_may_have_any_length(tmp_path, monkeypatch):
    """Those whose config.json has no length have no limit."""
    mamba = {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "conv_kernel": 4,
        "expand": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "state_size": 16,
        "time_step_rank": 4,
        "vocab_size": 64,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(mamba))
    given = {"model": str(tmp_path), "skip_tokenizer_init": True}
    assert resolve(**given).model.max_model_len == 2048
    found = resolve(**given, max_model_len=9000).model
    assert found.max_model_len == found.resolved_arch.derived_max_model_len == 9000
    path.write_text(json.dumps(mamba | {"max_position_embeddings": 512}))
    with pytest.raises(ConfigError, match="VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 lifts the limit"):
        resolve(**given, max_model_len=9000)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    envs.get.cache_clear()
    try:
        assert resolve(**given, max_model_len=9000).model.max_model_len == 9000
    finally:
        envs.get.cache_clear()


def test_a_shorter_length_is_taken():
    assert resolve(max_model_len="1k").scheduler.max_model_len == 1000


@pytest.mark.parametrize(
    ("checkpoint", "asked", "runs"),
    [
        ("float32", "auto", "float32"),
        ("float16", "auto", "float16"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("torch.bfloat16", "auto", "bfloat16"),
        ("torch.float16", "auto", "float16"),
        ("bf16", "auto", "bfloat16"),
        ("half", "auto", "float16"),
        ("auto", "auto", "float32"),
        (None, "auto", "float32"),
    ],
)
def test_the_dtype_is_settled(tmp_path, checkpoint, asked, runs):
    model = write_model(tmp_path, torch_dtype=checkpoint)
    assert resolve(model=model, dtype=asked).model.dtype == runs


@pytest.mark.parametrize("named", [{}, {"torch_dtype": None}, {"torch_dtype": "auto"}])
def test_a_config_without_a_dtype_has_the_one_of_most_weights(tmp_path, named):
    config = {k: v for k, v in BUNDLED_CONFIG.items() if k not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(config | named))
    parts = {"a": torch.zeros(4, 4, dtype=torch.bfloat16), "b": torch.zeros(2)}
    parts |= {"c": torch.zeros(64, dtype=torch.int32)}
    save_file(parts, tmp_path / "model.safetensors")
    settings = {"model": str(tmp_path), "skip_tokenizer_init": True}
    assert resolve(**settings).model.dtype == "bfloat16"
    assert resolve(dtype="float32", **settings).model.dtype == "float32"
    assert resolve(load_format="dummy", **settings).model.dtype == "float32"


def test_a_checkpoint_dtype_that_cannot_run_is_refused(tmp_path):
    model = write_model(tmp_path, torch_dtype="float64")
    with pytest.raises(ConfigError, match="dtype float64 is not supported; set dtype to one of"):
        resolve(model=model)
    assert resolve(model=model, dtype="float32").model.dtype == "float32"


def test_bfloat16_weights_as_float16_are_a_warning(tmp_path, capsys):
    resolve(model=write_model(tmp_path), dtype="float16")
    assert "running bfloat16 weights as float16" in capsys.readouterr().err


def test_the_cache_size_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    envs.get.cache_clear()
    try:
        assert resolve().cache.kv_cache_memory_bytes == 2**29
        assert resolve(kv_cache_memory_bytes="3G").cache.kv_cache_memory_bytes == 3 * 2**30
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
        envs.get.cache_clear()
        assert resolve().cache.kv_cache_memory_bytes is None
    finally:
        envs.get.cache_clear()


def test_the_tokenizer_may_be_elsewhere_or_absent(tmp_path):
    model = write_model(tmp_path)
    assert resolve(model=model).model.tokenizer == model
    elsewhere = resolve(model=model, tokenizer=str(BUNDLED_MODEL))
    assert elsewhere.model.tokenizer == str(BUNDLED_MODEL)
    assert resolve(model=model, skip_tokenizer_init=True).model.tokenizer is None
    with pytest.raises(ConfigError, match="model folder '/no/tokenizer' does not exist"):
        resolve(model=model, tokenizer="/no/tokenizer")


def test_the_machine_of_an_engine_on_ray_needs_no_card():
    config = resolve(device="hpu", tensor_parallel_size=2, distributed_executor_backend="ray")
    assert config.device.device == "hpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/no/such"}, "model folder '/no/such' does not exist"),
        ({"device": "hpu"}, "no usable Gaudi card"),
        ({"device": "tpu"}, "tpu"),
        ({"block_size": 12}, "block_size must be a power of two, got 12"),
        ({"pipeline_parallel_size": 99}, "pipeline_parallel_size=99: the model has"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be"),
        (
            {"hf_overrides": {"architectures": ["Nope"]}},
            "architecture 'Nope' is not supported, and the installed transformers has no decoder "
            "of that name either. Use a checkpoint of",
        ),
        (
            {"hf_overrides": {"architectures": ["DiffLlamaForCausalLM"]}, "model_impl": "vllm"},
            "with model_impl='vllm'. Leave model_impl out to run it with the model code of "
            "transform",
        ),
    ],
)
def test_what_cannot_start_is_one_line_that_names_it(settings, message):
    with pytest.raises(ConfigError) as failure:
        resolve(**settings)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_as_many_log_probabilities_as_tokens_may_be_allowed():
    config = resolve(max_logprobs=-1)
    assert config.model.max_logprobs == config.model.resolved_arch.vocab_size


def test_rope_scaling_makes_the_model_longer():
    config = resolve(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert config.scheduler.max_model_len == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": [], "model_type": "unheard_of"}, r"has no 'architectures'"),
        ({"architectures": "Llama"}, "'architectures' must be a list .*, got 'Llama'. Correct"),
        ({"architectures": [None]}, r"'architectures' must be a list .*, got '\[None\]'"),
        (
            {"architectures": ["LlamaForCausalML"], "model_type": "unheard_of"},
            r"'LlamaForCausalML' is not supported \(the nearest: LlamaForCausalLM, ",
        ),
        ({"model_type": "unheard_of"}, "model_type 'unheard_of' of .* does not support it"),
    ],
)
def test_a_model_nobody_here_can_run_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        resolve(model=write_model(tmp_path, **changes))


SWITCHES = {
    field.name: (section, field.default)
    for section, kind in config_sections(VllmConfig).items()
    for field in config_fields(kind)
    if field.kind == "bool"
}


@loop_over("name", SWITCHES)
def test_every_switch_reaches_the_config(name):
    section, default = SWITCHES[name]
    config = EngineArgs(**{name: not default}).create_engine_config()
    assert getattr(getattr(config, section), name) is (not default)


def test_config_and_defaults_can_come_from_another_folder_than_the_weights(tmp_path):
    weights, elsewhere = tmp_path / "weights", tmp_path / "config"
    for folder in (weights, elsewhere):
        folder.mkdir()
    (weights / "tokenizer.json").touch()
    write_model(elsewhere, max_position_embeddings=99)
    (elsewhere / "generation_config.json").write_text('{"temperature": 0.25}')
    with pytest.raises(ConfigError, match="has no config"):
        resolve(model=str(weights))
    config = resolve(model=str(weights), hf_config_path=str(elsewhere))
    assert (config.model.path, config.model.tokenizer) == (str(weights), str(weights))
    assert config.scheduler.max_model_len == 99
    assert load_generation_defaults(config.model)["temperature"] == 0.25
    with pytest.raises(ConfigError, match="'/no/such' does not exist"):
        resolve(model=str(weights), hf_config_path="/no/such")


def test_a_token_is_neither_shown_nor_sent_to_another_process():
    args = EngineArgs(hf_token="hf_secret")
    assert args.hf_token == "hf_secret"
    assert "hf_secret" not in repr(args)
    assert "hf_secret" not in repr(LoadConfig(hf_token="hf_secret"))
    assert args.create_engine_config().load.hf_token is None


def test_code_of_a_revision_without_permission_to_run_it_is_told(capsys):
    assert resolve(code_revision="abc") == replace_model(resolve(), code_revision="abc")
    assert (
        "code_revision=abc has no effect: the model's own code runs with" in capsys.readouterr().err
    )


def replace_model(config: VllmConfig, **changes: Any) -> VllmConfig:
    return replace(config, model=replace(config.model, **changes))


def test_without_its_windows_a_model_is_as_long_as_the_smallest(tmp_path):
    model = write_model(
        tmp_path,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=64,
    )
    windowed, full = resolve(model=model), resolve(model=model, disable_sliding_window=True)
    assert (windowed.scheduler.max_model_len, full.scheduler.max_model_len) == (2048, 64)
    assert set(windowed.model.arch.layer_windows) == {64}
    assert set(full.model.arch.layer_windows) == {None}
    shorter = resolve(model=model, disable_sliding_window=True, max_model_len=32)
    assert shorter.scheduler.max_model_len == 32
    with pytest.raises(ConfigError) as failure:
        resolve(model=model, disable_sliding_window=True, max_model_len=65)
    assert str(failure.value).startswith("max_model_len (65) must be at most 64, the size of the")
    assert str(failure.value).endswith("to 64, or leave disable_sliding_window out")


def test_a_model_without_windows_stays_as_it_is():
    assert resolve(disable_sliding_window=True) == replace_model(
        resolve(), disable_sliding_window=True
    )


def test_weights_on_the_host_are_what_the_cpu_has_anyway(capsys):
    assert resolve(cpu_offload_gb=4) == resolve()
    assert "cpu_offload_gb=4 has no effect: on the device 'cpu' all" in capsys.readouterr().err


@pytest.mark.parametrize("number", [-1, float("inf"), float("nan")])
def test_less_than_nothing_on_the_host_is_refused(number):
    with pytest.raises(ConfigError, match="cpu_offload_gb must be at least 0, got"):
        resolve(cpu_offload_gb=number)


@pytest.mark.parametrize(
    ("settings", "num_slots", "num_in_host_memory"),
    [
        ({}, 4, 16),
        ({"max_cpu_loras": 1}, 1, 1),
        ({"max_cpu_loras": 3}, 3, 3),
        ({"max_cpu_loras": 30}, 4, 30),
        ({"max_loras": 2}, 2, 8),
        ({"max_loras": 2, "max_cpu_loras": 3}, 2, 3),
    ],
)
def test_slots_follow_the_adapters_in_host_memory(settings, num_slots, num_in_host_memory):
    config = EngineArgs(enable_lora=True, **settings).create_engine_config()
    assert (config.lora.num_slots, config.lora.num_in_host_memory) == (
        *(num_slots, num_in_host_memory),
    )
    assert config.scheduler.max_loras == num_slots


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras .3. must be at least max_loras .4."),
        ({"max_loras": 0}, "max_loras must be an integer of at least 1"),
        ({"max_cpu_loras": 0}, "max_cpu_loras must be an integer of at least 1"),
        ({"max_lora_rank": 0}, "max_lora_rank must be an integer of at least 1"),
    ],
)
def test_wrong_limits_of_adapters_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(enable_lora=True, **settings).create_engine_config()


def test_settings_of_drafts_that_change_nothing_are_accepted_with_a_line_each(capsys):
    given = {"method": "ngram", "acceptance_method": "typical", "posterior_alpha": 0.3}
    given |= {"draft_tensor_parallel_size": 1, "disable_logprobs": None}
    config = resolve(speculative_config=given, num_scheduler_steps=4)
    assert config.scheduler.max_draft_tokens == 32
    assert config.scheduler.num_scheduler_steps == 1, "drafts take their place"
    lines = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    names = ["acceptance_method", "posterior_alpha", "draft_tensor_parallel_size", "num_scheduler"]
    assert len(lines) == len(names)
    for line, name in zip(lines, names, strict=True):
        assert name in line


@pytest.mark.parametrize(
    ("given", "num_seqs", "num_drafts"),
    [
        ({"method": "ngram"}, 128, 7),
        ({"method": "suffix"}, 16, 10),
        ({"method": "ngram"}, 1, 16),
        ({"method": "ngram", "num_speculative_tokens": 12}, 128, 12),
    ],
)
def test_a_card_looks_up_fewer_drafts_the_more_requests_may_run(given, num_seqs, num_drafts):
    with simulated_hpu():
        config = resolve(device="hpu", speculative_config=given, max_num_seqs=num_seqs)
    assert config.scheduler.max_draft_tokens == num_drafts
    assert config.speculative.drafts.num_speculative_tokens == num_drafts


def test_resolvers_run_after_those_whose_results_they_read():
    """A resolver is a function of its parameters, so it can read nothing else."""
    known = {"given": Mapping[str, Any], "platform": Platform}
    for name, resolver in RESOLVERS.items():
        types = get_type_hints(resolver)
        written = types.pop("return")
        assert types.items() <= known.items(), f"{name} reads {types}, known are {known}"
        assert name not in known, f"{name} is written twice"
        known[name] = written
    assert {field.name for field in fields(VllmConfig)} <= known.keys()
    assert {name: known[name] for name in get_type_hints(VllmConfig)} == get_type_hints(VllmConfig)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("deepseek_v32", "DeepseekV32ForCausalLM"), ("glm_moe_dsa", "GlmMoeDsaForCausalLM")],
)
def test_it_is_said_once_that_sparse_attention_runs_as_dense(tmp_path, caplog, model_type, name):
    if not is_known_to_transformers(name):
        pytest.skip(f"this transformers does not know {model_type}")
    changes = {"model_type": model_type, "architectures": [name], "index_topk": 512}
    resolve(model=write_model(tmp_path, **changes))
    lines = [r.getMessage() for r in caplog.records if "dense attention" in r.getMessage()]
    assert lines == [
        f"{name} runs with dense attention. For sequences of more than index_topk tokens (512), "
        "the original model uses sparse attention, so outputs differ from it"
    ]


@pytest.mark.parametrize(
    ("settings", "most_ms"),
    [
        ({}, 300),
        ({"task": "embed", "max_step_ms": 80}, 0),
        ({"max_step_ms": 0}, 0),
        ({"max_step_ms": 80}, 80),
        ({"enable_chunked_prefill": False}, 0),
        ({"distributed_executor_backend": "external_launcher"}, 0),
    ],
)
def test_the_time_of_a_step_is_bounded_on_a_cpu_where_prompts_may_be_divided(settings, most_ms):
    assert resolve(**settings).scheduler.max_step_ms == most_ms


def test_the_buckets_of_a_card_decide_the_time_of_a_step():
    with simulated_hpu():
        assert resolve(device="hpu").scheduler.max_step_ms == 0
        assert resolve(device="hpu", max_step_ms=500).scheduler.max_step_ms == 500


def test_processes_of_an_external_launcher_must_not_schedule_by_their_clocks():
    with pytest.raises(ConfigError, match="max_step_ms must be 0 with distributed"):
        resolve(distributed_executor_backend="external_launcher", max_step_ms=100)


@pytest.mark.parametrize(("given", "most_ms"), [(None, 0), (80, 80)])
def test_no_bound_for_outputs_that_are_read_when_they_are_complete(given, most_ms):
    args = EngineArgs(max_step_ms=given)
    assert args.without_streams().max_step_ms == most_ms
    assert args.max_step_ms == given
