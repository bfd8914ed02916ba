"""Environment variables of the vLLM 0.9 Gaudi fork and its plugin that have no effect in this
version.

No setting of an existing deployment is ignored silently. A variable that only tunes something gives
a warning, if this engine does not have the feature or needs no setting for it. A variable is an
error at the start if ignoring it would change weights or guarantees. `envs` reads the environment
and declares the variables that have an effect. Variables of
other software are in `env/others`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CompatVariable:
    """One variable that has no effect."""

    name: str
    reason: str
    """Reason why the variable has no effect, or feature that is missing; a clause without a full
    stop."""
    available: bool = True
    """True: accepted with a warning. False: an engine does not start while it is set."""
    same_as: bool | None = None
    """A switch with this value has no effect because it asks for the normal behaviour, so there is
    no warning."""


def _ignored(reason: str, names: str, same_as: bool | None = None) -> list[CompatVariable]:
    return [CompatVariable(name, reason, same_as=same_as) for name in names.split()]


def _refused(reason: str, name: str, same_as: bool | None = None) -> CompatVariable:
    return CompatVariable(name, reason, available=False, same_as=same_as)


_V0 = "it belongs to the V0 engine, which this version does not have"
_IN_PROCESS = (
    "LLM runs the engine in the caller's process; a server talks to its engine process over a "
    "socket file that it names itself"
)
_NO_TIMEOUTS = (
    "a step may take any time, or --distributed-timeout-s on several devices; a dead engine is "
    "noticed at once; --request-timeout limits a request"
)
_QUANTIZATION = "quantization on a card has no such setting"
_IMAGE_SIZES = (
    "every image has a padded size that is warmed up, chosen by the model or by "
    "VLLM_MULTIMODAL_BUCKETS"
)
_IMAGE_CACHE = "set --mm-processor-cache-gb instead"
_VIDEO = "videos are always decoded by PyAV (FFmpeg)"
_IMAGE_WARM_UP = "the warm-up always runs every padded size of the image encoder"
_IMAGE_SOFTMAX = "image encoders always use fused attention with the exact softmax"
_EXPERTS = (
    "MoE execution has no setting but --enable-expert-parallel: on hpu every expert processes "
    "every token"
)
_RECURRENT = "the state of Mamba layers has only one layout and one implementation"
_GATED_DELTA = "gated delta networks (GDN) always process prompts in chunks, in float32"
_LATENT = "latent attention has only one implementation, with a latent cache"
_STRUCTURED = "compiled grammars are kept within grammar_cache_bytes"
_DISAGGREGATED = "kv_transfer_config chooses where KV blocks are kept and shared"
_ONE_SUM = "the results of several devices are always added in one collective operation"
_REPLICAS = "--data-parallel-size starts the replicas of the engine and gives each its index"
_RAY = "each Ray actor is always one worker with one device"
_OTHER_DEVICE = "it is for a different kind of device"
_OTHER_BUILD = "it belongs to the build and the container images of the Gaudi fork"
_OTHER_TESTS = "it belongs to the tests of the Gaudi fork"
_DETECTED = "the engine detects the value that it overrides"
_NO_UNLOCKING = "all settings are always available"
_PROMPT_ATTENTION = "set VLLM_PROMPT_USE_FUSEDSDPA or VLLM_PROMPT_USE_FLEX_ATTENTION instead"
_FLOAT32_SOFTMAX = (
    "the softmax of decodes is always float32, and the softmax of prompts is float32 with "
    "VLLM_PROMPT_USE_FUSEDSDPA=0"
)
_WINDOW_OF_KERNEL = (
    "fused attention uses the sliding window at every length that its kernel supports"
)
_DEFRAGMENTED = (
    "the blocks of running requests are compacted if decodes read slices of the KV cache; "
    "set VLLM_CONTIGUOUS_PA=0 to turn this off"
)
_RUNS_AHEAD = (
    "steps are scheduled ahead if that saves time, see --async-scheduling; outputs are the same"
)
_NO_CACHE_FOLDER = "this version keeps no files there; HF_HOME is the folder of downloaded models"
_NO_USAGE_STATS = "no usage data is ever sent"
_NO_COMPILE_CACHE = "the compile cache that it controls does not exist in this version"


def _family(dimensions: tuple[str, ...], *parts: str) -> str:
    return " ".join(f"VLLM_{d}_BUCKET_{part}" for d in dimensions for part in parts)


_MEDIA_PROCESSES = "images, sounds and videos are always prepared in other processes"
_SCHEDULED = "the scheduler decides when waiting prompts run"
_TRACES = "traces always have the shapes of operators; set VLLM_TORCH_PROFILER_DIR for them"
_STDERR = "log lines are written to stderr, without colours"

VARIABLES: tuple[CompatVariable, ...] = (
    # Refused, because the engine would compute something other than what was asked for.
    _refused("models are not downloaded from ModelScope", "VLLM_USE_MODELSCOPE", same_as=False),
    _refused("names of models cannot be redirected to other folders", "VLLM_MODEL_REDIRECT_PATH"),
    _refused(
        "results are not bit for bit the same for every batch",
        "VLLM_BATCH_INVARIANT",
        same_as=False,
    ),
    *_ignored("there is only one engine, of the V1 design", "VLLM_USE_V1", same_as=True),
    # Buckets, warm-up and graphs:
    *_ignored("a batch on a card always has a bucket", "VLLM_ENABLE_BUCKETING", same_as=True),
    *_ignored("set VLLM_BUCKETING_STRATEGY instead", "VLLM_LINEAR_BUCKETING"),
    *_ignored(
        "the Gaudi fork does not read it either",
        _family(("PROMPT_BS", "PROMPT_SEQ", "DECODE_BS", "DECODE_BLOCK"), "LIMIT"),
    ),
    *_ignored("set VLLM_GRAPH_RESERVED_MEM instead", "VLLM_GRAPH_MEM_MARGIN"),
    *_ignored("set VLLM_GRAPH_PROMPT_RATIO instead", "VLLM_GRAPH_DECODE_RATIO"),
    *_ignored(
        "set VLLM_DECODE_BLOCK_BUCKET_MIN, VLLM_DECODE_BLOCK_BUCKET_STEP and "
        "VLLM_DECODE_BLOCK_BUCKET_MAX instead, which are numbers of KV blocks",
        _family(("DECODE_SEQ",), "MIN", "STEP", "MAX"),
    ),
    *_ignored(_SCHEDULED, "VLLM_SUSPEND_PROMPT"),
    *_ignored(
        "the bridge reads PT_HPU_RECIPE_CACHE_CONFIG instead",
        "PT_RECIPE_CACHE_PATH PT_CACHE_FOLDER_SIZE_MB PT_CACHE_FOLDER_DELETE",
    ),
    *_ignored(_DEFRAGMENTED, "VLLM_DEFRAG", same_as=True),
    *_ignored(_DEFRAGMENTED, "VLLM_DEFRAG_THRESHOLD VLLM_DEFRAG_WITH_GRAPHS"),
    # Attention and execution:
    *_ignored("set VLLM_CONTIGUOUS_PA instead", "VLLM_USE_HPU_CONTIGUOUS_CACHE_FETCH"),
    *_ignored(_PROMPT_ATTENTION, "VLLM_NAIVE_IMPL VLLM_PROMPT_ATTN_IMPL"),
    *_ignored("the device decides the attention backend", "VLLM_ATTENTION_BACKEND"),
    *_ignored("the attention backend decides the layout", "VLLM_KV_CACHE_LAYOUT"),
    *_ignored("ALiBi biases are always float32", "VLLM_ALIBI_USE_FLOAT32_BIASES", same_as=True),
    *_ignored(
        _FLOAT32_SOFTMAX, "VLLM_FP32_SOFTMAX VLLM_USE_FP32_SOFTMAX VLLM_PRESERVE_QK_FP32_ACCUM_RES"
    ),
    *_ignored(_WINDOW_OF_KERNEL, "VLLM_FUSEDSDPA_SLIDE_THLD VLLM_FUSEDSDPA_SLIDE_RIGHT"),
    *_ignored(
        "the graph of a forward pass always contains all slices of fused attention",
        "VLLM_HPU_FSDPA_SLICE_WITH_GRAPH_BREAKS",
        same_as=False,
    ),
    *_ignored(
        "the RoPE table is computed once, at the start", "VLLM_COS_SIN_RECOMPUTE", same_as=False
    ),
    *_ignored(
        "HPU graphs are always split after VLLM_CONFIG_HIDDEN_LAYERS layers",
        "VLLM_HPU_FORCE_MARK_STEP",
        same_as=True,
    ),
    *_ignored(_RUNS_AHEAD, "VLLM_DELAYED_SAMPLING VLLM_HPU_USE_DELAYED_SAMPLING", same_as=True),
    *_ignored(
        "tokens that tie with the k-th most likely one are always kept",
        "VLLM_HANDLE_TOPK_DUPLICATES",
        same_as=True,
    ),
    *_ignored("set VLLM_REGIONAL_COMPILATION instead", "VLLM_T_COMPILE_REGIONAL_COMPILATION"),
    *_ignored(
        "set VLLM_T_COMPILE_FULLGRAPH instead",
        "VLLM_TEST_DYNAMO_FULLGRAPH_CAPTURE VLLM_FULLGRAPH_COMPILATION",
    ),
    *_ignored(
        _NO_COMPILE_CACHE,
        "VLLM_DISABLE_COMPILE_CACHE VLLM_USE_STANDALONE_COMPILE VLLM_TEST_STANDALONE_COMPILE "
        "VLLM_COMPILE_CACHE_SAVE_FORMAT",
    ),
    *_ignored(
        "models always get the flattened tokens of a batch",
        "VLLM_FLATTEN_INPUT",
        same_as=True,
    ),
    *_ignored("weights are read one tensor at a time", "VLLM_WEIGHT_LOAD_FORCE_SYNC"),
    *_ignored("set PT_HPU_LAZY_MODE instead", "VLLM_BRIDGE_MODE"),
    *_ignored("prompts and decodes of a step run in separate forward passes", "VLLM_UNIFIED_ATTN"),
    *_ignored("set the argument enable_prefix_caching instead", "VLLM_PREFIX_CACHING"),
    *_ignored(_DETECTED, "VLLM_HW VLLM_BUILD VLLM_ENGINE_VERSION VLLM_MODEL_TYPE"),
    *_ignored(_NO_UNLOCKING, "VLLM_DEVELOPER_MODE VLLM_ENABLE_EXPERIMENTAL_FLAGS"),
    # Diagnostics:
    *_ignored("set VLLM_LOGGING_LEVEL=DEBUG instead", "VLLM_DEBUG"),
    *_ignored(
        "set VLLM_PROFILE_STEPS and VLLM_TORCH_PROFILER_DIR instead",
        """
        VLLM_ENGINE_PROFILER_ENABLED VLLM_ENGINE_PROFILER_WARMUP_STEPS VLLM_ENGINE_PROFILER_STEPS
        VLLM_ENGINE_PROFILER_REPEAT VLLM_PROFILE_CONFIG_PATH VLLM_PROFILE_FILE
        """,
    ),
    *_ignored("set --gpu-memory-utilization instead", "VLLM_GPU_MEMORY_UTILIZATION"),
    *_ignored(
        "set VLLM_PT_PROFILE instead",
        """
        VLLM_PROFILE_EXECUTE_MODEL_PROMPT VLLM_PROFILE_EXECUTE_MODEL_DECODE
        VLLM_PROFILE_EXECUTE_MODEL_DECODE_STEPS
        """,
    ),
    *_ignored(
        _TRACES,
        """
        VLLM_TORCH_PROFILER_RECORD_SHAPES VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY
        VLLM_TORCH_PROFILER_WITH_STACK VLLM_TORCH_PROFILER_WITH_FLOPS VLLM_TORCH_PROFILER_USE_GZIP
        """,
    ),
    *_ignored(_STDERR, "VLLM_LOGGING_STREAM VLLM_LOGGING_COLOR"),
    *_ignored("statistics are logged every 10 seconds", "VLLM_LOG_STATS_INTERVAL"),
    *_ignored("calls of functions are not traced", "VLLM_TRACE_FUNCTION", same_as=False),
    *_ignored("batch sizes are not logged", "VLLM_LOG_BATCHSIZE_INTERVAL"),
    *_ignored(
        "PYTHONWARNINGS=ignore::DeprecationWarning hides the warnings of Python",
        "VLLM_NO_DEPRECATION_WARNING",
    ),
    *_ignored(_NO_USAGE_STATS, "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK", same_as=True),
    *_ignored(_NO_USAGE_STATS, "VLLM_USAGE_STATS_SERVER VLLM_USAGE_SOURCE"),
    # Settings of features that have fewer settings in this engine:
    *_ignored(
        _QUANTIZATION,
        """
        VLLM_DISABLE_MARK_SCALES_AS_CONST VLLM_HPU_FORCE_CHANNEL_FP8 VLLM_HPU_CONVERT_TO_FP8UZ
        VLLM_SCALE_ADJUSTMENT VLLM_PER_TOKEN_KV_SCALING_SUPPORT VLLM_DYNAMIC_KV_QUANT
        HPU_ALIGNED_SCALE HPU_MXFP4_NATIVE Q_SCALE_CONSTANT K_SCALE_CONSTANT V_SCALE_CONSTANT
        VLLM_USE_TRITON_AWQ VLLM_HPU_MARK_SCALES_AS_CONST VLLM_REQUANT_FP8_INC VLLM_USE_FP8_MATMUL
        VLLM_ENABLE_RUNTIME_DEQUANT VLLM_DMOE_DYNAMIC_SCALE INC_FORCE_NAIVE_SCALING
        INC_MEASUREMENT_DUMP_PATH_PREFIX
        """,
    ),
    *_ignored(
        _EXPERTS,
        """
        VLLM_USE_DISPATCH_FN VLLM_MOE_CHUNK VLLM_MOE_TOKEN_BOUNDARY MAX_EXPERTS_PER_SLICE
        HPU_FUSED_MOE VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_MINIMAX_M3_MOE_TOKEN_TILE
        VLLM_MINIMAX_M3_MOE_DECODE_GATHER VLLM_MINIMAX_M3_MOE_GATHER_MAX_TOKENS
        VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_DISABLE_SHARED_EXPERTS_STREAM
        VLLM_ALL2ALL_BACKEND VLLM_FUSED_MOE_CHUNK_SIZE VLLM_ENABLE_MOE_ALIGN_BLOCK_SIZE_TRITON
        VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_CPU_MOE_PREPACK VLLM_MOE_N_SLICE VLLM_EP_SIZE
        VLLM_MOE_SLICE_LENGTH VLLM_USE_STATIC_MOE_HPU VLLM_SUPPORT_MOE_CHUNK
        """,
    ),
    *_ignored(
        _RECURRENT,
        """
        VLLM_USE_HYBRID_CACHE VLLM_USE_NAIVE_MAMBA_CACHE_SHARING VLLM_MAMBA_USE_PYTORCH
        VLLM_MAMBA_USE_SELECTIVE_STATE_UPDATE_REF_PT
        """,
    ),
    *_ignored(
        _GATED_DELTA,
        """
        VLLM_COMPACT_GDN VLLM_GDN_LEGACY_PHASE_B VLLM_GDN_EXACT_SOLVE VLLM_GDN_COMPUTE_FP32
        """,
    ),
    *_ignored(
        _LATENT,
        "VLLM_MLA_DISABLE VLLM_MLA_DISABLE_REQUANTIZATION VLLM_MLA_PERFORM_MATRIX_ABSORPTION",
    ),
    *_ignored(_IMAGE_SIZES, "VLLM_MULTIMODAL_RESOLUTIONS"),
    *_ignored(_IMAGE_CACHE, "VLLM_MM_INPUT_CACHE_GIB"),
    *_ignored(_VIDEO, "VLLM_VIDEO_LOADER_BACKEND"),
    *_ignored(_MEDIA_PROCESSES, "VLLM_ENABLE_ASYNC_MM_PREPROCESS", same_as=True),
    *_ignored(_MEDIA_PROCESSES, "VLLM_MAX_CONCURRENT_PREPROC VLLM_MEDIA_LOADING_THREAD_COUNT"),
    *_ignored(_IMAGE_WARM_UP, "VLLM_MM_WARMUP_OUTSIDE_COMPILE_ONLY"),
    *_ignored(_IMAGE_SOFTMAX, "VLLM_FP32_SOFTMAX_VISION"),
    *_ignored(
        _DISAGGREGATED,
        """
        MOONCAKE_CONFIG_PATH VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
        VLLM_NIXL_ABORT_REQUEST_TIMEOUT VLLM_NIXL_DEVICE_TO_DEVICE VLLM_NIXL_BACKEND
        VLLM_HPU_HETERO_KV_LAYOUT VLLM_HPU_NIXL_JOINT_KV VLLM_HPU_NIXL_STAGING_SLOTS
        VLLM_KV_TRANSFER_CONFIG VLLM_KV_CONNECTOR LMCACHE_CHUNK_SIZE LMCACHE_LOCAL_CPU
        LMCACHE_MAX_LOCAL_CPU_SIZE LMCACHE_REMOTE_URL LMCACHE_REMOTE_SERDE
        LMCACHE_USE_EXPERIMENTAL LMCACHE_CONFIG_FILE VLLM_USE_ASYNC_TRANSFER_IN_PD
        """,
    ),
    *_ignored(
        _STRUCTURED, "VLLM_XGRAMMAR_CACHE_MB VLLM_V0_USE_OUTLINES_CACHE VLLM_V1_USE_OUTLINES_CACHE"
    ),
    # Processes, several devices, and the server:
    *_ignored(_ONE_SUM, "VLLM_ROW_PARALLEL_CHUNKS VLLM_ROW_PARALLEL_CHUNK_THRESHOLD"),
    *_ignored(
        _REPLICAS,
        """
        VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT
        VLLM_DISABLE_NCCL_FOR_DP_SYNCHRONIZATION
        """,
    ),
    *_ignored(
        _RAY,
        """
        VLLM_USE_RAY_SPMD_WORKER VLLM_USE_RAY_COMPILED_DAG VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
        VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES
        VLLM_RAY_DISABLE_LOG_TO_DRIVER VLLM_USE_RAY_WRAPPED_PP_COMM
        """,
    ),
    *_ignored(_IN_PROCESS, "VLLM_ENABLE_V1_MULTIPROCESSING", same_as=False),
    *_ignored(
        _NO_TIMEOUTS,
        """
        VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_RPC_TIMEOUT VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        VLLM_ENGINE_READY_TIMEOUT_S
        """,
    ),
    *_ignored(
        _IN_PROCESS,
        """
        VLLM_PORT VLLM_RPC_BASE_PATH VLLM_WORKER_MULTIPROC_METHOD
        VLLM_WORKER_MULTIPROCESSING_METHOD VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_LOOPBACK_IP
        VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_SLEEP_WHEN_IDLE
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_DIST_IDENT
        """,
    ),
    *_ignored(
        "messages between processes are never pickled",
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        same_as=False,
    ),
    *_ignored("responses are not logged", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE", same_as=False),
    *_ignored(
        "the API process always detokenises", "VLLM_DETOKENIZE_ON_OPENAI_SERVER", same_as=True
    ),
    *_ignored("no tool parser needs a timeout", "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS"),
    *_ignored("a server serves one model", "VLLM_HPU_MULTI_MODEL_CONFIG"),
    # Variables for other devices or other packages:
    *_ignored(_V0, "VLLM_LOGITS_PROCESSOR_THREADS"),
    *_ignored(_NO_CACHE_FOLDER, "VLLM_CACHE_ROOT VLLM_CONFIG_ROOT"),
    *_ignored(
        "the kernels choose the best instruction set of the processor when they are loaded",
        "VLLM_CPU_DISABLE_AVX512 VLLM_CPU_AVX512BF16",
    ),
    *_ignored("set VLLM_CPU_OMP_THREADS_BIND instead", "VLLM_CPU_NUM_OF_RESERVED_CPU"),
    *_ignored("set VLLM_CPU_KERNELS instead", "VLLM_CPU_SGL_KERNEL VLLM_CPU_ATTN_SPLIT_KV"),
    *_ignored(
        _OTHER_DEVICE,
        """
        VLLM_NCCL_SO_PATH VLLM_CUDART_SO_PATH VLLM_SKIP_P2P_CHECK VLLM_DISABLED_KERNELS
        VLLM_USE_TRITON_FLASH_ATTN VLLM_FLASH_ATTN_VERSION VLLM_USE_FLASHINFER_SAMPLER
        VLLM_FLASHINFER_FORCE_TENSOR_CORES VLLM_V1_USE_PREFILL_DECODE_ATTENTION VLLM_USE_DEEP_GEMM
        VLLM_TEST_FORCE_FP8_MARLIN VLLM_MARLIN_USE_ATOMIC_ADD VLLM_QUARK_EMU_MEM_OPT
        VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION VLLM_XLA_USE_SPMD
        VLLM_TPU_BUCKET_PADDING_GAP VLLM_TPU_PROFILE_DELAY_MS VLLM_TPU_PROFILE_DURATION_MS
        VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_PAGED_ATTN VLLM_ROCM_USE_AITER_LINEAR
        VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_MLA
        VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING
        VLLM_ROCM_CUSTOM_PAGED_ATTN VLLM_NEURON_FRAMEWORK
        """,
    ),
    *_ignored(
        _OTHER_BUILD,
        """
        VLLM_USE_PRECOMPILED VLLM_PRECOMPILED_WHEEL_LOCATION VLLM_INSTALL_PUNICA_KERNELS
        VLLM_TEST_USE_PRECOMPILED_NIGHTLY_WHEEL VLLM_MAX_SIZE_MB VLLM_FA_CMAKE_GPU_ARCHES
        VLLM_CUTLASS_SRC_DIR VLLM_PATH VLLM_PATH2 VLLM_REPO VLLM_GAUDI_REPO VLLM_COMMIT
        VLLM_PROJECT_COMMIT VLLM_STABLE_COMMIT VLLM_GAUDI_COMMIT VLLM_COMMUNITY_COMMIT
        VLLM_FORK_COMMIT VLLM_BRANCH VLLM_REF_OVERRIDE VLLM_PLUGIN_PATH VLLM_GAUDI_PREFIX
        VLLM_VERSION VLLM_COMMIT_HASH VLLM_CUSTOM
        """,
    ),
    *_ignored(
        _OTHER_TESTS,
        "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_TEST_ENABLE_ARTIFICIAL_PREEMPT VLLM_CI_USE_S3",
    ),
)

COMPAT_VARIABLES: Mapping[str, CompatVariable] = {v.name: v for v in VARIABLES}
"""Name -> variable, in the order of the documentation."""

FEATURES: tuple[tuple[str, str], ...] = (
    (
        _OTHER_DEVICE,
        """
        CUDA CUDAGRAPH CUDNN NCCL PYNCCL ROCM AITER TPU XLA NEURON XPU FLASHINFER FLASH_ATTN TRTLLM
        DEEP_GEMM DEEPGEMM DEEPEP NVFP4 NVTX MARLIN CUTLASS TRITON FBGEMM SYMM_MEM
        """,
    ),
    (_EXPERTS, "MOE EXPERTS"),
    (_GATED_DELTA, "GDN"),
    (_LATENT, "MLA"),
    (_DISAGGREGATED, "NIXL MOONCAKE LMCACHE"),
    (_REPLICAS, "DP"),
)
"""Words of names, and why a variable with this word has no effect. There are many such variables,
and each release has others, so that a list of names would never be complete."""


def variable_of_feature(name: str) -> CompatVariable | None:
    """Return the variable of a name that is not listed, by a word of the name; None if no word
    says what it is for.

    >>> variable_of_feature("VLLM_USE_FLASHINFER_MOE_FP8").reason
    'it is for a different kind of device'
    """
    for reason, words in FEATURES:
        if any(f"_{word}_" in f"{name}_" for word in words.split()):
            return CompatVariable(name, reason)
    return None
