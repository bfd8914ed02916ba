"""Handle engine arguments of the vLLM 0.9 Gaudi fork, and of newer releases of vLLM, that are not
fields of the configs.

Scripts and commands of model cards should keep working as far as possible. An argument that only
tunes something that this engine lacks, or does by itself, is accepted with a warning. An argument
that requests a missing feature is an error, because without the feature the results would differ or
there would be none.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config.speculative import KEYS_WITHOUT_EFFECT
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.utils.arguments import flag_of

logger = init_logger(__name__)


@dataclass(frozen=True)
class CompatArgument:
    """One argument of the fork, or of a newer release."""

    name: str
    off: Any
    """Default of the flag in the fork. Its type decides which values the flag accepts."""
    reason: str
    """Reason why the flag has no effect, or is not available; a clause without a full stop."""
    available: bool
    """True: accepted without effect. False: refused unless set to `off`."""
    also_off: tuple[Any, ...] = ()
    """Further values that have no effect."""
    aliases: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None
    """Checks and converts a given value. Raises ConfigError with the message without the argument's
    name."""

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def _ignored(name: str, off: Any, reason: str, **more: Any) -> CompatArgument:
    return CompatArgument(name, off, reason, available=True, **more)


def _missing(name: str, off: Any, reason: str, **more: Any) -> CompatArgument:
    return CompatArgument(name, off, reason, available=False, **more)


def _all_ignored(reason: str, off: Any, names: str) -> Iterator[CompatArgument]:
    for name in names.split():
        yield _ignored(name, off, reason)


def _all_missing(reason: str, off: Any, names: str) -> Iterator[CompatArgument]:
    for name in names.split():
        yield _missing(name, off, reason)


_V0_ONLY = "it belongs to the V0 scheduler, which this version does not have"
_NO_CUDA_GRAPHS = "this version does not use CUDA graphs"
_TOKENIZER_POOL = "tokenisation runs in the frontend, without a pool"
_ENCODER_WHOLE = "the engine decides how an image encoder is split over several ranks"
_LORA_OFF = "this engine reads adapters only in the format of peft, which has no such setting"
_LORA_SHARDS = (
    "the engine decides how the two matrices of an adapter are split over ranks; outputs are the "
    "same"
)
_PROMPT_ADAPTERS_OFF = "it only matters with prompt adapters, which are not supported"
_DP_LOCAL = (
    "replicas on other machines are started there by `vllm serve --headless`, and their workers "
    "are in a Ray cluster with --distributed-executor-backend ray, see docs/data_parallel.md"
)
_DEVICE = "the device decides which kernels run, and what is compiled and recorded"
_EXPERTS = "the engine decides how experts are divided over ranks; outputs are the same"
_RANKS = "the engine decides how ranks work together; outputs are the same"
_STATES = "recurrent states are always float32, and the engine decides how they are stored"
_MACHINES = (
    "ranks on other machines are placed by Ray (--distributed-executor-backend ray), see "
    "docs/data_parallel.md"
)
_OF_DECODER = "only the language model has adapters, which each request names"
_MERGE = (
    "adapters are given with enable_lora and lora_modules, or with each request; the model may be "
    "quantized while it is loaded (quantization)"
)


def _read_compilation(given: Any) -> Any:
    """Check a compilation level (`-O3`), given as a level, a dict, JSON, or an object of the
    fork.
    """
    try:
        content = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        content = given
    if isinstance(content, Mapping):
        level = content.get("level", 0)
    else:
        level = getattr(content, "level", content)
    if level is not None and (type(level) is not int or not 0 <= level <= 3):
        raise ConfigError(f'must be a level from 0 to 3 or {{"level": 3, ...}}, got {given!r}')
    return given


_LOADER_KEYS = ("pattern", "qlora_adapter_name_or_path", "tensorizer_uri")
"""Settings of loaders that choose which weights are read."""


def _read_loader(given: Any) -> Any:
    """Check the settings of a loader, as a dict or JSON: settings of speed have no effect."""
    try:
        content = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        content = None
    if not isinstance(content, Mapping):
        raise ConfigError(f"must be a JSON object, got {given!r}")
    if found := [key for key in _LOADER_KEYS if content.get(key)]:
        raise ConfigError(
            f"has the key {found[0]!r}, which chooses other weights: not available in this "
            "version. Leave it out"
        )
    return given


_ARGUMENTS = (
    _ignored("swap_space", 4.0, "a preempted request is recomputed, never swapped to the host"),
    _ignored("preemption_mode", None, "a preempted request is always recomputed"),
    _ignored("use_v2_block_manager", True, "there is only one block manager"),
    _ignored(
        "use_padding_aware_scheduling",
        False,
        "the scheduler counts tokens without padding, and each step is split into batches that "
        "fit a bucket",
    ),
    _ignored("max_num_prefill_seqs", None, "prefills are limited by max_num_batched_tokens"),
    _ignored("scheduler_delay_factor", 0.0, _V0_ONLY),
    _ignored("num_lookahead_slots", 0, _V0_ONLY),
    _ignored("multi_step_stream_outputs", True, _V0_ONLY),
    _ignored("disable_async_output_proc", False, _V0_ONLY),
    _ignored("disable_hybrid_kv_cache_manager", False, "there is only one KV cache manager"),
    _ignored("enable_multimodal_encoder_data_parallel", False, _ENCODER_WHOLE),
    _ignored("disable_cascade_attn", False, "this version has no cascade attention"),
    _ignored("attention_backend", None, "the device decides the attention backend"),
    _ignored("max_context_len_to_capture", None, _NO_CUDA_GRAPHS),
    _ignored("cuda_graph_sizes", (512,), _NO_CUDA_GRAPHS),
    _ignored("disable_custom_all_reduce", False, "this version has no custom all-reduce"),
    _ignored(
        "compilation_config",
        None,
        "the device decides what is compiled and recorded; enforce_eager turns both off",
        aliases=("-O", "-cc"),
        read=_read_compilation,
    ),
    _ignored("additional_config", {}, "no device of this version uses it"),
    _ignored("override_neuron_config", {}, "this version has no Neuron platform"),
    _ignored("worker_use_ray", False, "--distributed-executor-backend ray chooses Ray"),
    _ignored("ray_workers_use_nsight", False, "workers are not started by a profiler"),
    _ignored("tokenizer_pool_size", 0, _TOKENIZER_POOL),
    _ignored("tokenizer_pool_type", "ray", _TOKENIZER_POOL),
    _ignored("tokenizer_pool_extra_config", {}, _TOKENIZER_POOL),
    _ignored("disable_log_requests", False, "requests are logged with --log-requests only"),
    _ignored("show_hidden_metrics_for_version", None, "no metrics are hidden"),
    _ignored("weights_load_device", None, "weights are read on the host, one tensor at a time"),
    _ignored("pt_load_map_location", "cpu", "weights are read on the host, one tensor at a time"),
    _ignored("max_parallel_loading_workers", None, "weights are read one tensor at a time"),
    _ignored("split_qkv", False, "the model classes decide how projections are stored"),
    _ignored("enable_reasoning", None, "a reasoning parser is chosen by its name only"),
    _ignored(
        "reasoning_parser",
        "",
        "the outputs of an engine include the reasoning; `vllm serve --reasoning-parser` separates "
        "it, and so do the parsers of vllm.reasoning",
    ),
    _ignored(
        "weights_padding",
        False,
        "weights are stored in the layout that the kernels of the device need",
    ),
    _ignored("enable_lora_bias", False, _LORA_OFF),
    _ignored(
        "speculative_draft_tensor_parallel_size",
        1,
        KEYS_WITHOUT_EFFECT["draft_tensor_parallel_size"],
        aliases=("-spec-draft-tp",),
    ),
    _ignored("speculative_disable_mqa_scorer", False, KEYS_WITHOUT_EFFECT["disable_mqa_scorer"]),
    _ignored(
        "spec_decoding_acceptance_method",
        "rejection_sampler",
        KEYS_WITHOUT_EFFECT["acceptance_method"],
    ),
    _ignored(
        "typical_acceptance_sampler_posterior_threshold",
        0.09,
        KEYS_WITHOUT_EFFECT["posterior_threshold"],
    ),
    _ignored(
        "typical_acceptance_sampler_posterior_alpha", 0.3, KEYS_WITHOUT_EFFECT["posterior_alpha"]
    ),
    _ignored(
        "disable_logprobs_during_spec_decoding", True, KEYS_WITHOUT_EFFECT["disable_logprobs"]
    ),
    _ignored("fully_sharded_loras", False, _LORA_SHARDS),
    _ignored("lora_extra_vocab_size", 256, _LORA_OFF),
    _ignored("long_lora_scaling_factors", (), _LORA_OFF),
    _ignored("max_prompt_adapters", 1, _PROMPT_ADAPTERS_OFF),
    _ignored("max_prompt_adapter_token", 0, _PROMPT_ADAPTERS_OFF),
    _missing("data_parallel_backend", "mp", _DP_LOCAL, aliases=("-dpb",)),
    _missing(
        "config_format",
        "auto",
        "a model is described by a config.json as transformers writes it, or by the params.json of "
        "Mistral AI; hf_config_path names one outside the model's folder",
        also_off=("hf", "mistral"),
    ),
    _ignored(
        "model_loader_extra_config", {}, "weights are read one tensor at a time", read=_read_loader
    ),
    # Newer releases:
    *_all_ignored(_DEVICE, {}, "attention_config kernel_config profiler_config"),
    *_all_ignored(
        _DEVICE, None, "moe_backend mamba_backend mm_encoder_attn_backend optimization_level"
    ),
    *_all_ignored(_DEVICE, None, "performance_mode max_cudagraph_capture_size"),
    *_all_ignored(_DEVICE, (), "cudagraph_capture_sizes"),
    *_all_ignored(_DEVICE, False, "enable_flashinfer_autotune enable_layerwise_nvtx_tracing"),
    *_all_ignored(_EXPERTS, False, "enable_eplb enable_ep_weight_filter"),
    *_all_ignored(_EXPERTS, {}, "eplb_config"),
    *_all_ignored(
        _EXPERTS, None, "num_redundant_experts expert_placement_strategy all2all_backend"
    ),
    *_all_ignored(_RANKS, False, "enable_dbo disable_nccl_for_dp_synchronization"),
    *_all_ignored(
        _RANKS,
        None,
        "dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size "
        "decode_context_parallel_size prefill_context_parallel_size "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
    ),
    *_all_ignored(
        _STATES, None, "mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode mamba_block_size"
    ),
    *_all_ignored(_STATES, False, "enable_mamba_cache_stochastic_rounding"),
    *_all_ignored(_ENCODER_WHOLE, None, "mm_encoder_tp_mode"),
    *_all_ignored(
        "processed images are cached in the memory of the server",
        None,
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb renderer_num_workers",
    ),
    *_all_ignored("a token is sent as soon as it is generated", None, "stream_interval"),
    *_all_ignored("weights are read one tensor at a time", None, "safetensors_load_strategy"),
    *_all_ignored(
        "kv_transfer_config chooses where KV blocks are kept outside of the cache",
        None,
        "kv_offloading_size kv_offloading_backend",
    ),
    *_all_ignored("cpu_offload_gb keeps weights in host memory", None, "offload_backend"),
    *_all_ignored(
        "the engine decides which layers an adapter changes in a step",
        False,
        "specialize_active_lora",
    ),
    *_all_ignored("each engine writes one line of statistics", False, "aggregate_engine_logging"),
    *_all_ignored(
        "no quantization of this version is deprecated", False, "allow_deprecated_quantization"
    ),
    *_all_ignored("unknown variables are a warning", False, "fail_on_environ_validation"),
    *_all_ignored("the reasoning parser knows the markers of thoughts", {}, "reasoning_config"),
    *_all_ignored(
        "a long prompt waits until its first part fits", False, "scheduler_reserve_full_isl"
    ),
    _missing(
        "logprobs_mode",
        "raw_logprobs",
        "log-probabilities follow from the logits before temperature and penalties",
    ),
    *_all_missing(
        "requests name logits processors, see --logits-processor-pattern", (), "logits_processors"
    ),
    *_all_missing(_OF_DECODER, {}, "default_mm_loras"),
    *_all_missing(_OF_DECODER, False, "enable_tower_connector_lora"),
    *_all_missing("the model gets all tokens of a video", None, "video_pruning_rate"),
    *_all_missing("images stand where the chat template puts them", False, "interleave_mm_strings"),
    *_all_missing(_DP_LOCAL, False, "data_parallel_hybrid_lb data_parallel_external_lb"),
    _missing("nnodes", 1, _MACHINES),
    *_all_missing(_MACHINES, None, "node_rank master_addr master_port"),
    *_all_missing("weights are read once, when the engine starts", {}, "weight_transfer_config"),
    *_all_missing("the encoder runs in the engine itself", {}, "ec_transfer_config"),
    *_all_missing("the encoder runs in the engine itself", False, "mm_encoder_only"),
    *_all_missing("outputs do not name experts", False, "enable_return_routed_experts"),
    *_all_missing("the number of ranks is fixed while an engine runs", False, "enable_elastic_ep"),
    *_all_missing("prompts and outputs are as the API defines them", None, "io_processor_plugin"),
    _missing("qlora_adapter_name_or_path", None, _MERGE),
    _missing(
        "quantization_param_path",
        None,
        "scales of an FP8 KV cache are read from the checkpoint (k_scale, v_scale) or, with "
        "quantization inc, from the files of QUANT_CONFIG",
    ),
    _missing(
        "enable_prompt_adapter",
        False,
        "prompt adapters are not supported; put instructions into a system prompt",
    ),
    _missing(
        "otlp_traces_endpoint",
        None,
        "only a server traces its requests (`vllm serve --otlp-traces-endpoint`)",
    ),
    _missing(
        "collect_detailed_traces",
        None,
        "a trace has one span per request; VLLM_PROFILER_ENABLED=1 writes a file with the time of "
        "each part of a step",
    ),
    _missing(
        "scheduler_cls",
        "vllm.core.scheduler.Scheduler",
        "there is only one scheduler; scheduling_policy chooses the order of requests",
        also_off=("vllm.v1.core.sched.scheduler.Scheduler",),
    ),
)

COMPAT_ARGUMENTS: Mapping[str, CompatArgument] = {a.name: a for a in _ARGUMENTS}
"""Name -> argument, in the order of the documentation."""


def accept(name: str, value: Any) -> None:
    """Check an argument of `COMPAT_ARGUMENTS`, and warn that it has no effect. None means "not
    given".

    Raises:
        ConfigError: it requests a feature that is not available.
    """
    argument = COMPAT_ARGUMENTS[name]
    if value is None:
        return
    if argument.read is not None:
        try:
            value = argument.read(value)
        except ConfigError as error:
            raise ConfigError(f"{name} {error}") from None
    if argument.available:
        logger.warning("%s=%s has no effect: %s", name, value, argument.reason)
    elif value != argument.off and value not in argument.also_off:
        raise ConfigError(describe_refusal(argument, value))


def describe_refusal(argument: CompatArgument, value: Any) -> str:
    """Return the message that refuses an argument for a feature that is not available."""
    reason = f"not available in this version: {argument.reason}"
    return f"{argument.name}={value!r}: {reason}. Leave it out."
