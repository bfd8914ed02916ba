"""Environment variables that other software reads: this package does not change the ones that are
set.

They do have an effect, so no warning speaks of them. The documentation lists them, with what this
package relies on.
"""

from dataclasses import dataclass

from vllm.env.bridge import BRIDGE_SETTINGS


@dataclass(frozen=True)
class OtherReader:
    """Software, and its variables that a user of this package meets."""

    reader: str
    names: tuple[str, ...]
    note: str = ""
    """Use of the variables by this package."""
    is_for_workers: bool = False
    """Whether workers on other machines get the engine's values."""


def _read_by(
    reader: str, names: str, note: str = "", *, is_for_workers: bool = False
) -> OtherReader:
    return OtherReader(reader, tuple(names.split()), note, is_for_workers)


OTHER_READERS = (
    _read_by(
        "the Habana bridge and the graph compiler, with a value that the engine sets",
        " ".join(setting.name for setting in BRIDGE_SETTINGS),
        "the engine sets those that are unset, see above",
        is_for_workers=True,
    ),
    _read_by(
        "the Habana bridge and the graph compiler",
        """
        PT_COMPILE_ONLY_MODE PT_HPU_GPU_MIGRATION PT_HPU_USE_EAGER_FALLBACK
        PT_HPU_MAX_COMPOUND_OP_SIZE PT_HPU_ENABLE_RESTORE_KV_LAYOUT
        PT_HPU_SDPA_QKV_SLICE_MODE_FWD PT_HPU_QKV_SLICE_SEQ_LEN_THLD PT_HPU_SDPA_BC_FACTOR
        PT_HPU_SDPA_BR_FACTOR
        EXPERIMENTAL_WEIGHT_SHARING PT_HPU_H2D_TRIVIAL_SCALES_MODE
        ENABLE_EXPERIMENTAL_FLAGS ENABLE_SKIP_REMOVAL_OF_GRAPH_INPUT_IDENTITY_NODES
        ENABLE_FUSION_BEFORE_NORM FUSER_ENABLE_LOW_UTILIZATION PT_HPU_EAGER_PIPELINE_ENABLE
        PT_HPU_EAGER_COLLECTIVE_PIPELINE_ENABLE PT_ENABLE_COMM_GROUP_CACHE
        PT_ENABLE_MEMORY_DEFRAGMENTATION PT_HABANA_POOL_SIZE PT_HCCL_MEMORY_ALLOWANCE_MB
        PT_HPUGRAPH_ENABLE_DRY_RUN PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST
        PT_HPU_COMPILE_THREAD_POOL_SIZE PT_HPU_COMPILE_USE_RECIPES
        PT_HPU_DISABLE_HPUGRAPH_REPLAY_HASHCHECK PT_HPU_DISALLOW_TORCH_COMPILE
        PT_HPU_EMULATE_DISTRIBUTED PT_HPU_ENABLE_CACHE_METRICS PT_HPU_ENABLE_FUSED_SDPA_SINK
        PT_HPU_ENABLE_H2D_COPY_ASYNC_THREAD PT_HPU_ENABLE_H2D_SCALES PT_HPU_ENABLE_HPUGRAPH_THREAD
        PT_HPU_ENABLE_NEGATIVE_INDEXING PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES
        PT_HPU_ENABLE_VALID_DATA_RANGE_CHECK PT_HPU_FORCE_STATIC_COMPILE PT_HPU_FORCE_TANH_FOR_GELU
        PT_HPU_H2D_COPY_MIN_TENSOR_SIZE PT_HPU_HUGE_PAGES_LIMIT_MB PT_HPU_KEEP_INPUT_MUTATIONS
        PT_HPU_METRICS_DUMP_TRIGGERS PT_HPU_METRICS_FILE PT_HPU_METRICS_FILE_FORMAT
        PT_HPU_PLACE_ON_CPU PT_HPU_POOL_MEM_ACQUIRE_PERC PT_HPU_POOL_STRATEGY
        PT_HPU_PRINT_DEVICE_CONFIG PT_HPU_QUEUE_SYNLAUNCHES PT_HPU_RECIPE_CACHE_NFS_TIMEOUT_S
        PT_HPU_STOCHASTIC_ROUNDING_MODE PT_HPU_USE_INPLACE_INDEX_COPY PT_HPU_USE_PHILOX_NORMAL
        PT_HPU_WRAP_RANDOM_OPS_COMPILE PT_RECIPE_CACHE_IGNORE_VERSION
        """,
        "this package passes them on unchanged",
        is_for_workers=True,
    ),
    _read_by(
        "the driver, the container runtime and the profiler of Habana",
        """
        HABANA_VISIBLE_DEVICES HABANA_VISIBLE_MODULES HABANA_PROFILE HABANA_PROFILE_WRITE_HLTV
        HABANA_PROF_CONFIG HABANA_LOGS HABANA_PLUGINS_LIB_PATH HABANA_SCAL_BIN_PATH GC_KERNEL_PATH
        GRAPH_VISUALIZATION LOG_LEVEL_ALL LOG_LEVEL_PT ENABLE_CONSOLE
        """,
        is_for_workers=True,
    ),
    _read_by(
        "collective libraries and launchers",
        """
        HCCL_SOCKET_IFNAME HCCL_COMM_ID HCCL_OVER_OFI HCCL_OVER_TCP GLOO_SOCKET_IFNAME
        NCCL_SOCKET_IFNAME CCL_ATL_TRANSPORT
        OMPI_MCA_btl_vader_single_copy_mechanism LOCAL_RANK RANK LOCAL_WORLD_SIZE HLS_MODULE_ID ID
        """,
        "workers use them to exchange tensors; --distributed-executor-backend external_launcher "
        "reads RANK, LOCAL_RANK and LOCAL_WORLD_SIZE",
    ),
    _read_by(
        "huggingface_hub and transformers",
        "HF_TOKEN HF_HOME HF_HUB_OFFLINE XDG_CACHE_HOME",
        "models that are given by name, not as a folder, are downloaded by huggingface_hub",
    ),
    _read_by(
        "PyTorch, OpenMP and Python",
        """
        KMP_AFFINITY GOMP_SPINCOUNT TORCHINDUCTOR_COMPILE_THREADS TORCHINDUCTOR_CACHE_DIR
        TRITON_CACHE_DIR LD_LIBRARY_PATH LD_PRELOAD PYTHONHASHSEED
        """,
        "the engine process of a server starts with GOMP_SPINCOUNT=1000 if it is not set",
    ),
    _read_by("the build of this package", "CXX", "the C++ compiler of the CPU kernels"),
    _read_by(
        "Ray",
        "RAY_ADDRESS RAY_USAGE_STATS_ENABLED RAY_CGRAPH_get_timeout RAY_IGNORE_UNHANDLED_ERRORS",
        "the executor ray (--distributed-executor-backend ray) joins the cluster of RAY_ADDRESS",
    ),
    _read_by(
        "libraries of other devices",
        """
        CUDA_HOME CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER HIP_VISIBLE_DEVICES NVCC_THREADS
        NCCL_CUMEM_ENABLE PYTORCH_NVML_BASED_CUDA_CHECK TORCH_NCCL_AVOID_RECORD_STREAMS
        PYTORCH_CUDA_ALLOC_CONF FLASHINFER_KV_CACHE_LAYOUT LIBTPU_INIT_ARGS PJRT_DEVICE
        TPU_VISIBLE_CHIPS CLOUD_TPU_TASK_ID NEURON_ON_DEVICE_SAMPLING_DISABLED NEURON_QUANT_DTYPE
        NEURON_COMPILED_ARTIFACTS NEURON_CORES
        """,
        "this package does not load them",
    ),
    _read_by(
        "clients, object stores and connectors",
        """
        OPENAI_API_KEY OPENAI_API_BASE S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL
        AWS_ENDPOINT_URL RUNAI_STREAMER_CONCURRENCY RUNAI_STREAMER_MEMORY_LIMIT
        RUNAI_STREAMER_S3_ENDPOINT PROMETHEUS_MULTIPROC_DIR LLGUIDANCE_LOG_LEVEL
        NIXL_BUFFER_DEVICE NIXL_DIR NIXL_HOME NIXL_INIT_AGENT UCX_TLS UCX_MEMTYPE_CACHE UCX_HOME
        UCX_DIR DO_NOT_TRACK XDG_CONFIG_HOME
        """,
        "this package does not use them; no usage data is ever sent",
    ),
    _read_by(
        "the start-up script of the vendor's container",
        """
        VLLM_SERVER_CONFIG_FILE VLLM_SERVER_CONFIG_NAME VLLM_BENCHMARK_CONFIG_FILE
        VLLM_BENCHMARK_CONFIG_NAME MODEL DRY_RUN DTYPE TENSOR_PARALLEL_SIZE MAX_MODEL_LEN
        MAX_NUM_SEQS MAX_NUM_BATCHED_TOKENS BLOCK_SIZE GPU_MEM_UTILIZATION ENABLE_PREFIX_CACHING
        ASYNC_SCHEDULING EXTRA_ARGS NUM_CPUS INPUT_TOK OUTPUT_TOK CONCURRENT_REQ
        """,
        "it builds a command line from them",
    ),
)
