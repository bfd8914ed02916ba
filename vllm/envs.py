"""Environment variables: the only module that reads `os.environ`.

One field is one variable: name, type, default and help in one place. Settings a user tunes per
deployment are config fields; a variable is for what must be known before a config exists (logging,
device selection) or is part of the compatibility surface. Code gets the values in a config
dataclass. This module does not log: the logger, which needs its level from here, also reports names
that have no effect. `env/compat` lists such names of the Gaudi fork with reasons. `env/fields`
defines the kinds of fields, and `env/bridge` the variables that this package sets for the Habana
bridge.
"""

import difflib
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

from vllm.env.bridge import BRIDGE_SETTINGS, BridgeSetting, bridge_settings
from vllm.env.compat import COMPAT_VARIABLES, CompatVariable, variable_of_feature
from vllm.env.fields import WORDS, env, parse
from vllm.env.others import OTHER_READERS
from vllm.errors import ConfigError

_PREFIX = "VLLM_"


_general = partial(env, section="General")
_server = partial(env, section="Server")
_cpu = partial(env, section="CPU")
_buckets = partial(env, section="Gaudi: buckets")
_warmup = partial(env, section="Gaudi: warm-up and graphs")
_execution = partial(env, section="Gaudi: attention and execution")
_diagnostics = partial(env, section="Gaudi: diagnostics")
_simulation = partial(env, section="Gaudi: simulation")


_PROMPT_STEP = "block_size, but at least 128"
_DECODE_STEP = "block_size of 128, and with other block sizes 128 * 128 / block_size"
_SEQ_PREFIX, _QUERY_PREFIX = "VLLM_PROMPT_SEQ_BUCKET_", "VLLM_PROMPT_QUERY_BUCKET_"


def _linear(what: str, default: str) -> Any:
    """Define one of the twelve variables of linear bucketing."""
    return _buckets(
        None, f"Buckets of the strategy linear: {what}. Default: {default}.", at_least=1
    )


def _padding(what: str, default: str, at_least: int = 0) -> Any:
    """Define one of the variables that only padding-aware bucketing reads."""
    return _buckets(
        None, f"Buckets of the strategy pad: {what}. Default: {default}.", at_least=at_least
    )


_pad_max = partial(_padding, default="a quarter of the largest size")
_pad_percent = partial(_padding, default="25")


@dataclass(frozen=True)
class Envs:
    """Every variable that has an effect; a section is a heading of docs/env_variables.md."""

    VLLM_TARGET_DEVICE: str | None = _general(
        None,
        "Device that vllm is installed for and runs on. Default: hpu if there is a Gaudi card, "
        "otherwise cpu.",
        ("hpu", "cpu"),
    )
    VLLM_LOGGING_LEVEL: str = _general(
        "INFO",
        "Level of the 'vllm' logger: messages below this level are not logged.",
        ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        other_words={"WARN": "WARNING", "FATAL": "CRITICAL"},  # names that `logging` has too
    )
    VLLM_LOGGING_PREFIX: str = _general("", "Text at the start of every log line.")
    VLLM_CONFIGURE_LOGGING: bool = _general(
        True,
        "0: do not configure logging, because the application configures the 'vllm' logger itself.",
    )
    VLLM_LOGGING_CONFIG_PATH: str | None = _general(
        None,
        "JSON file with logging settings for Python's `logging.config.dictConfig`. It replaces "
        "the handler and the level of this package.",
    )
    VLLM_LOGGING_FORMAT: str = _general(
        "text",
        "Format of the log lines: plain text, or one JSON object per line.",
        ("text", "json"),
    )
    VLLM_ALLOW_LONG_MAX_MODEL_LEN: bool = _general(
        False,
        "1: accept a max_model_len above the maximum in the model's config.json, for a model "
        "with rotary positions. Output beyond that length may be of poor quality.",
    )
    VLLM_ASSETS_CACHE: str | None = _general(
        None, "Folder with the images, sounds and videos that the examples use (`vllm.assets`)."
    )
    VLLM_IMAGE_FETCH_TIMEOUT: int = _general(
        5,
        "Maximum number of seconds to download an image from a URL, redirects included.",
        at_least=1,
    )
    VLLM_AUDIO_FETCH_TIMEOUT: int = _general(
        10,
        "Maximum number of seconds to download a sound from a URL, redirects included.",
        at_least=1,
    )
    VLLM_VIDEO_FETCH_TIMEOUT: int = _general(
        30,
        "Maximum number of seconds to download a video from a URL, redirects included.",
        at_least=1,
    )
    VLLM_MEDIA_URL_ALLOW_REDIRECTS: bool = _general(
        True,
        "Follow redirects when an image, sound or video is downloaded. Each new URL must also be "
        "allowed.",
    )
    VLLM_MAX_IMAGE_PIXELS: int = _general(
        178956970,
        "Maximum number of pixels (width x height) of an image, and of each frame of a video.",
        at_least=1,
    )
    VLLM_MAX_AUDIO_DECODE_DURATION_S: int = _general(
        600, "Maximum length of a sound in seconds.", at_least=1
    )
    VLLM_PLUGINS: str | None = _general(
        None,
        "Names of installed plug-ins to load, separated by commas. Empty: none. Default: all "
        "installed plug-ins.",
        may_be_empty=True,
    )
    VLLM_PP_LAYER_PARTITION: str | None = _general(
        None,
        "Number of layers of each stage of --pipeline-parallel-size, from first to last, such as "
        "12,10,10. Default: as even as possible; if they cannot be equal, the last stage has the "
        "fewest.",
    )
    VLLM_HOST_IP: str | None = _general(
        None,
        "Address at which workers on other machines reach this machine, with "
        "--distributed-executor-backend ray. Set it on each machine to its own address. Default: "
        "the address by which Ray knows the machine.",
    )
    QUANT_CONFIG: str | None = _general(
        None,
        "JSON file of Intel Neural Compressor (INC): it says what to measure, or which FP8 "
        "scales to use. Same as --quant-config.",
    )
    VLLM_API_KEY: str | None = _server(
        None, "API key that clients must send. Used only if --api-key is not given."
    )
    VLLM_ALLOW_RUNTIME_LORA_UPDATING: bool = _server(
        False,
        "Serve the routes /v1/load_lora_adapter and /v1/unload_lora_adapter. Everyone who can "
        "reach the server can then load adapters from folders of the server, and remove them.",
    )
    VLLM_LORA_RESOLVER_CACHE_DIR: str | None = _server(
        None,
        "Folder of LoRA adapters, with --enable-lora: a request can use each of its subfolders "
        "as model name, and the adapter is loaded at its first use.",
    )
    VLLM_SERVER_DEV_MODE: bool = _server(
        False,
        "Also serve these routes for development: /server_info, /reset_prefix_cache, "
        "/reset_mm_cache, /collective_rpc, /sleep, /wake_up, /is_sleeping. Do not set it on a "
        "public server.",
    )
    VLLM_MAX_AUDIO_CLIP_FILESIZE_MB: int = _server(
        25,
        "Maximum size of a file that is sent to /v1/audio/transcriptions or "
        "/v1/audio/translations, in MiB.",
        at_least=1,
    )
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE: int | None = _server(
        None,
        "Seconds that an idle connection stays open. Used only if --keep-alive-timeout is not "
        "given.",
        at_least=1,
    )
    VLLM_CPU_KVCACHE_SPACE: float | None = _cpu(
        None,
        "Size of the KV cache in GiB on the CPU, divided among the replicas of "
        "--data-parallel-size. Used only if --kv-cache-memory-bytes is not given. "
        "Default, or with 0: a fraction of the free memory.",
        at_least=0,
    )
    VLLM_CPU_OMP_THREADS_BIND: str = _cpu(
        "auto",
        "CPU cores on which the threads of the engine run, one thread per core, such as 0-3 or "
        "0,2,4. Workers share one list, and replicas divide it. For a list each, separate them "
        "with |: 0-1|2-3. auto: the engine chooses the number of threads and does not bind them to "
        "cores; workers on several NUMA nodes use the cores of their nodes. all or nobind: OpenMP "
        "decides.",
    )
    OMP_NUM_THREADS: str | None = _cpu(
        None,
        "Number of threads of the engine on the CPU; read by OpenMP. Default: chosen by "
        "VLLM_CPU_OMP_THREADS_BIND.",
    )
    VLLM_CPU_KERNELS: bool = _cpu(
        True, "1: use the C++ kernels on the CPU. 0: use the operators of torch, which are slower."
    )
    VLLM_CPU_ISA: str | None = _cpu(
        None,
        "Instruction set of the C++ kernels, to compare them: amx, avx512_bf16, avx512_vnni, "
        "avx512, avx_vnni, avx2, arm_bf16 or base. amx_portable gives the results of amx without "
        "its instructions: slow, only for tests. Default: the best one that the processor "
        "supports.",
    )
    VLLM_BUCKETING_STRATEGY: str = _buckets(
        "linear",
        "How the sizes of buckets are chosen. linear: in equal steps. exponential: with a "
        "constant ratio. sparse: like exponential, with fewer small sizes and only one prompt "
        "per batch. pad: the fewest sizes that keep padding below a limit. optimal: the "
        "--num-buckets buckets with the least padding for the traffic of --traffic (which "
        "implies optimal). linear and pad read the VLLM_*_BUCKET_* variables (with different "
        "defaults, see README_GAUDI.md); the others use only the limits of the engine.",
        ("linear", "exponential", "sparse", "pad", "optimal", "lin", "exp"),
    )
    VLLM_EXPONENTIAL_BUCKETING: bool | None = _buckets(
        None,
        "1: the strategy exponential; 0: the strategy linear. Default: the value of "
        "VLLM_BUCKETING_STRATEGY.",
    )
    VLLM_BUCKETING_FROM_FILE: str | None = _buckets(
        None, "File with a list of buckets. It is used instead of VLLM_BUCKETING_STRATEGY."
    )
    VLLM_PROMPT_BS_BUCKET_MIN: int | None = _linear("smallest number of prompts in a batch", "1")
    VLLM_PROMPT_BS_BUCKET_STEP: int | None = _linear(
        "step between sizes of prompt batches", "min(max_num_seqs, 32)"
    )
    VLLM_PROMPT_BS_BUCKET_MAX: int | None = _linear(
        "largest number of prompts in a batch", "min(max_num_seqs, 64)"
    )
    VLLM_PROMPT_SEQ_BUCKET_MIN: int | None = _linear(
        "smallest prompt length (tokens)", _PROMPT_STEP
    )
    VLLM_PROMPT_SEQ_BUCKET_STEP: int | None = _linear(
        "step between prompt lengths (tokens)", _PROMPT_STEP
    )
    VLLM_PROMPT_SEQ_BUCKET_MAX: int | None = _linear(
        "largest prompt length (tokens); a longer prompt is computed in parts", "1024"
    )
    VLLM_DECODE_BS_BUCKET_MIN: int | None = _linear(
        "smallest number of sequences in a decode batch", "1"
    )
    VLLM_DECODE_BS_BUCKET_STEP: int | None = _linear(
        "step between sizes of decode batches", "min(max_num_seqs, 32)"
    )
    VLLM_DECODE_BS_BUCKET_MAX: int | None = _linear(
        "largest number of sequences in a decode batch", "max_num_seqs"
    )
    VLLM_DECODE_BLOCK_BUCKET_MIN: int | None = _linear(
        "smallest number of KV blocks in a decode batch",
        _DECODE_STEP,
    )
    VLLM_DECODE_BLOCK_BUCKET_STEP: int | None = _linear(
        "step between numbers of KV blocks in decode batches",
        _DECODE_STEP,
    )
    VLLM_DECODE_BLOCK_BUCKET_MAX: int | None = _linear(
        "largest number of KV blocks in a decode batch",
        "max(128, max_num_seqs * 2048 / block_size)",
    )
    VLLM_PROMPT_CTX_BUCKET_MIN: int | None = _padding(
        "smallest number of KV blocks of context of prompts", "0"
    )
    VLLM_PROMPT_CTX_BUCKET_STEP: int | None = _padding(
        "step between numbers of KV blocks of context of prompts", "2", at_least=1
    )
    VLLM_PROMPT_CTX_BUCKET_MAX: int | None = _padding(
        "largest number of KV blocks of context of prompts", "the context of the longest request"
    )
    VLLM_PROMPT_BS_BUCKET_PAD_MAX: int | None = _pad_max(
        "maximum number of padding prompts in a batch"
    )
    VLLM_PROMPT_BS_BUCKET_PAD_PERCENT: int | None = _pad_percent(
        "maximum padding of prompts in a batch, in percent (0 to 50)"
    )
    VLLM_PROMPT_SEQ_BUCKET_PAD_MAX: int | None = _pad_max(
        "maximum number of padding tokens in a prompt"
    )
    VLLM_PROMPT_SEQ_BUCKET_PAD_PERCENT: int | None = _pad_percent(
        "maximum padding of tokens in a prompt, in percent (0 to 50)"
    )
    VLLM_PROMPT_CTX_BUCKET_PAD_MAX: int | None = _padding(
        "maximum number of padding KV blocks in the context", "the blocks of max_num_batched_tokens"
    )
    VLLM_PROMPT_CTX_BUCKET_PAD_PERCENT: int | None = _pad_percent(
        "maximum padding of KV blocks in the context, in percent (0 to 50)"
    )
    VLLM_DECODE_BS_BUCKET_PAD_MAX: int | None = _pad_max(
        "maximum number of padding sequences in a decode batch"
    )
    VLLM_DECODE_BS_BUCKET_PAD_PERCENT: int | None = _pad_percent(
        "maximum padding of sequences in a decode batch, in percent (0 to 50)"
    )
    VLLM_DECODE_BLOCK_BUCKET_PAD_MAX: int | None = _pad_max(
        "maximum number of padding KV blocks in a decode batch"
    )
    VLLM_DECODE_BLOCK_BUCKET_PAD_PERCENT: int | None = _pad_percent(
        "maximum padding of KV blocks in a decode batch, in percent (0 to 50)"
    )
    VLLM_MULTIMODAL_BUCKETS: str | None = _buckets(
        None,
        "Sizes for which the image encoder is warmed up, separated by commas. A size is a number "
        "of images or tiles if they all have the same shape, otherwise a number of patches. "
        "Patches are rounded up to multiples of 16, and the sizes of the largest image are added. "
        "Default: sizes that grow by a quarter.",
    )
    VLLM_MERGED_PREFILL: bool = _buckets(
        False,
        "Concatenate the prompts of a batch into one padded sequence, instead of padding "
        "each prompt.",
    )
    VLLM_SKIP_WARMUP: bool = _warmup(
        False,
        "Start without warm-up. Every new batch shape then compiles when it first occurs, and "
        "its requests wait. `vllm calibrate` never warms up, unless this variable is 0 or "
        "--warmup is given.",
    )
    VLLM_FULL_WARMUP: bool = _warmup(
        False,
        "Treat a compilation after the warm-up as an error. torch.compile then skips its guards, "
        "which is faster.",
    )
    VLLM_GRAPH_RESERVED_MEM: float = _warmup(
        0.1,
        "Fraction (0 to 1) of the usable device memory that is reserved for HPU graphs. The "
        "KV cache gets the rest.",
        at_least=0,
        at_most=1,
    )
    VLLM_GRAPH_PROMPT_RATIO: float = _warmup(
        0.3,
        "Fraction (0 to 1) of the memory for HPU graphs that prompt graphs may use. Decode "
        "graphs get the rest.",
        at_least=0,
        at_most=1,
    )
    VLLM_GRAPH_PROMPT_STRATEGY: str = _warmup(
        "min_tokens",
        "Order in which prompt graphs are captured, until their memory is full: fewest "
        "tokens first, or largest batch first.",
        ("min_tokens", "max_bs"),
    )
    VLLM_GRAPH_DECODE_STRATEGY: str = _warmup(
        "max_bs",
        "Order in which decode graphs are captured, until their memory is full: fewest "
        "tokens first, or largest batch first.",
        ("min_tokens", "max_bs"),
    )
    PT_HPU_RECIPE_CACHE_CONFIG: str | None = _warmup(
        None,
        "Folder where compiled recipes are kept between runs, so that the next warm-up is "
        "faster: `path,delete at start,size in MB`, such as /tmp/recipes,false,1024. Read by the "
        "Habana bridge. A simulated card keeps its own recipes there.",
    )
    PT_HPU_LAZY_MODE: bool | None = _execution(
        None,
        "1: lazy mode (HPU graphs). 0: eager mode (torch.compile). Read by the Habana bridge, to "
        "which another word, such as true, is passed on as 1 or 0. Default: the default of the "
        "bridge; 0 on a simulated card.",
    )
    PT_HPUGRAPH_DISABLE_TENSOR_CACHE: bool | None = _execution(
        None,
        "0: every HPU graph keeps its inputs and intermediate tensors, so fewer graphs fit into "
        "the memory. 1, and default: graphs keep only their outputs. Read by the Habana bridge, "
        "which accepts only 1; true is passed on as 1.",
    )
    PT_HPU_ENABLE_LAZY_COLLECTIVES: bool | None = _execution(
        None,
        "Record collective operations as part of HPU graphs. Read by the Habana bridge. With "
        "several processes, the engine always sets it to true.",
    )
    WORLD_SIZE: int = _execution(
        1,
        "Number of processes that work together, set by launchers such as torchrun. If it is "
        "above 1, each process uses the card that LOCAL_RANK gives.",
        at_least=1,
    )
    VLLM_CONTIGUOUS_PA: bool | None = _execution(
        None,
        "1: decode attention reads the KV cache as one contiguous slice if that costs less than "
        "gathering blocks; a decode bucket then needs up to two graphs, or three with prefix "
        "caching. 0: it always gathers the blocks. Default: 1; 0 with prefix caching together "
        "with a draft model or a KV connector.",
    )
    VLLM_PROMPT_USE_FUSEDSDPA: bool = _execution(
        True,
        "1: use the fused attention kernel for prompts. 0: use plain matmuls, which are slower.",
    )
    VLLM_PROMPT_USE_FLEX_ATTENTION: bool = _execution(
        False,
        "Use torch's flex_attention for prompts. Needs VLLM_PROMPT_USE_FUSEDSDPA=0. Not "
        "available on a simulated card, and never tried on a real one.",
    )
    VLLM_PROMPT_USE_FP8_FUSEDSDPA: bool = _execution(
        False,
        "Use fused attention in FP8 for prompts. Needs --quantization inc, --kv-cache-dtype "
        "fp8_inc, and files of `vllm calibrate` that contain measured ranges of the attention "
        "queries. Layers with windows or "
        "sinks still use bfloat16, and so do cards on which the kernel fails a check at the "
        "start.",
    )
    VLLM_HPU_FSDPA_SLICE_ENABLED: bool | None = _execution(
        None,
        "Split the queries of long prompts into slices for fused attention, because the masks of "
        "slices need less memory than one mask for all queries. Default: on with "
        "VLLM_BUCKETING_STRATEGY=pad, unless VLLM_MERGED_PREFILL is on.",
    )
    VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD: int | None = _execution(
        None,
        "Number of padded tokens of a prompt, its context included, above which the queries are "
        "split into slices (VLLM_HPU_FSDPA_SLICE_...). Default: max_num_batched_tokens, at most "
        "8192.",
        at_least=1,
    )
    VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE: int | None = _execution(
        None,
        "Number of queries in one slice. Default: half of VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD, "
        "rounded up to a multiple of 1024.",
        at_least=1,
    )
    VLLM_SOFTMAX_CONST_NORM: bool = _execution(
        False,
        "In the softmax of decode attention, subtract VLLM_SOFTMAX_CONST_NORM_VALUE from the "
        "scores instead of their maximum. Faster, but inaccurate if scores are far from that "
        "value.",
    )
    VLLM_SOFTMAX_CONST_NORM_VALUE: float = _execution(
        10.0, "Constant that is subtracted from the scores with VLLM_SOFTMAX_CONST_NORM=1."
    )
    VLLM_PA_SOFTMAX_IMPL: str | None = _execution(
        None,
        "How the softmax of decode attention is kept from overflowing: a comma-separated list of "
        "amax, head_amax, wsum, wsum_head_amax, index_reduce and scatter_reduce. Each one "
        "subtracts another value from the scores. Default: the largest score of each block is "
        "subtracted, which is exact.",
    )
    VLLM_FUSED_BLOCK_SOFTMAX: bool = _execution(
        False,
        "1: in decode attention, compute the softmax of each KV block with a fused kernel of the "
        "card (Gaudi 3, Gaudi software 1.22 or later). Needs VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT.",
    )
    VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT: bool = _execution(
        True,
        "1: in decode attention, combine the softmax of the KV blocks of a request with a fused "
        "kernel, if the card has one (Gaudi 3, Gaudi software 1.22 or later). 0: use torch "
        "operators, which are slower.",
    )
    VLLM_CONFIG_HIDDEN_LAYERS: int = _execution(
        1,
        "Number of decoder layers in one recorded graph, in lazy mode with one card. With several "
        "cards, a graph ends before each all-reduce.",
        at_least=1,
    )
    VLLM_REGIONAL_COMPILATION: bool = _execution(
        True, "With torch.compile: compile each decoder layer on its own, not the model as a whole."
    )
    VLLM_T_COMPILE_FULLGRAPH: bool = _execution(
        False, "With torch.compile: treat a graph break as an error."
    )
    VLLM_T_COMPILE_DYNAMIC_SHAPES: bool = _execution(
        False,
        "With torch.compile: let torch compile for dynamic shapes. The bridge still compiles a "
        "static recipe for each shape that occurs.",
    )
    VLLM_GC_THR_GEN0: int = _execution(
        700,
        "First threshold of Python's garbage collector in the worker (see `gc.set_threshold`). "
        "If all three thresholds have their defaults, they are multiplied by "
        "VLLM_GC_THR_MULTIPLIER.",
        at_least=0,
    )
    VLLM_GC_THR_GEN1: int = _execution(
        10,
        "Second threshold of Python's garbage collector in the worker (see VLLM_GC_THR_GEN0).",
        at_least=0,
    )
    VLLM_GC_THR_GEN2: int = _execution(
        10,
        "Third threshold of Python's garbage collector in the worker (see VLLM_GC_THR_GEN0).",
        at_least=0,
    )
    VLLM_GC_THR_MULTIPLIER: int = _execution(
        16,
        "Factor for the thresholds of Python's garbage collector. With a larger one, garbage is "
        "collected less often.",
        at_least=1,
    )
    VLLM_PROFILER_ENABLED: bool = _diagnostics(
        False,
        "Write a trace of the scheduler, forward passes and counters, in a format that "
        "Perfetto opens. full, a value of the Gaudi fork, is the same as 1: traces of torch's "
        "profiler are files of their own (VLLM_TORCH_PROFILER_DIR).",
        means_true=("full",),
    )
    VLLM_TORCH_PROFILER_DIR: str | None = _diagnostics(
        None,
        "Folder for traces of torch's profiler. Recording is started and stopped by "
        "start_profile and stop_profile of the engine, or by POST /start_profile and "
        "/stop_profile of the server.",
    )
    VLLM_PROFILE_STEPS: str | None = _diagnostics(
        None,
        "First and last engine step to record with torch's profiler, counted from 1, such as "
        "3,5. The trace is written to VLLM_TORCH_PROFILER_DIR, or to the working directory.",
    )
    VLLM_PT_PROFILE: str | None = _diagnostics(
        None,
        "Record one forward pass with torch's profiler, then exit: prompt_BATCH_LENGTH_t or "
        "decode_BATCH_BLOCKS_t, such as prompt_1_1024_t; f instead of t at the end runs it "
        "without an HPU graph. The trace is written to VLLM_TORCH_PROFILER_DIR, or to the "
        "working directory.",
    )
    VLLM_PROFILE_PROMPT: str | None = _diagnostics(
        None,
        "Record one prompt batch with torch's profiler, then exit: batch,length,blocks of "
        "context, such as 1,512,0.",
    )
    VLLM_PROFILE_DECODE: str | None = _diagnostics(
        None,
        "Record one decode batch with torch's profiler, then exit: batch,blocks, such as 4,128.",
    )
    VLLM_HPU_LOG_STEP_GRAPH_COMPILATION: bool = _diagnostics(
        False, "Log the graph compilations of each step in which a graph was compiled."
    )
    VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL: bool = _diagnostics(
        False, "Log the number of graph compilations of every step, including 0."
    )
    PT_HPU_METRICS_GC_DETAILS: bool = _diagnostics(
        False,
        "Record the name and the time of each compiled recipe, which "
        "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION then also logs. Read by the Habana bridge.",
    )
    VLLM_HPU_LOG_STEP_CPU_FALLBACKS: bool = _diagnostics(
        False,
        "Log the operators that ran on the CPU instead of the card, for each step that had any.",
    )
    VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL: bool = _diagnostics(
        False, "Log the operators that ran on the CPU instead of the card, for every step."
    )
    VLLM_HPU_SIM: str | None = _simulation(
        None,
        "Simulate a Gaudi card of this model: the device `hpu` then computes on the CPU, and "
        "counts compilations, host syncs and copies.",
        ("gaudi2", "gaudi3"),
    )
    VLLM_HPU_SIM_BRIDGE: str = _simulation(
        "1.24",
        "Gaudi software release that the simulated card has. Kernels of later releases are "
        "missing.",
        tuple(f"1.{minor}" for minor in range(19, 25)),
    )
    VLLM_HPU_SIM_ABSENT: str | None = _simulation(
        None,
        "Kernels that the simulated card does not have, in addition, separated by commas, such "
        "as FusedSDPA,FusedRMSNorm. `vllm hpu-check` lists the names.",
    )
    VLLM_USE_FAKE_HPU: bool = _simulation(
        False, "Simulate a Gaudi 2 card; the same as VLLM_HPU_SIM=gaudi2."
    )
    VLLM_HPU_SIM_STRICT: bool = _simulation(
        False,
        "Raise an error if the simulated card finds one of these: a compilation, host sync or "
        "dynamic shape in a step after the warm-up; an index out of range; inputs with the hash "
        "of other inputs, for which a card would replay the wrong graph; a collective in a graph "
        "without a mark_step before it.",
    )
    VLLM_HPU_SIM_VENDOR: bool = _simulation(
        False,
        "Offer the simulated card to other libraries as the package `habana_frameworks`, if that "
        "is not installed. They then behave as on a Gaudi machine.",
    )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> "Envs":
        """Read every declared variable once.

        An empty value means "not set", except for lists that may be empty.

        Raises:
            ConfigError: a value does not parse (the error contains the variable, value and accepted
                form), or two names of one variable have different values.
        """
        environ = os.environ if environ is None else environ
        types = typing.get_type_hints(cls)
        given: dict[str, dict[str, Any]] = {
            f.name: {
                name: parse(name, environ[name], types[f.name], f.metadata)
                for name in (f.name, *aliases_of(f.name))
                if environ.get(name, "").strip() or (name in environ and f.metadata["may_be_empty"])
            }
            for f in fields(cls)
        }
        for values in given.values():
            if len(set(values.values())) > 1:
                settings = " and ".join(f"{name}={value}" for name, value in values.items())
                raise ConfigError(f"{settings} are two names of one setting. Set one of them")
        return cls(**{name: values.popitem()[1] for name, values in given.items() if values})


@cache
def get() -> Envs:
    """Return the environment variables of this process, read at the first call."""
    return Envs.load()


if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a variable under its own name, as programs read it:
        `vllm.envs.VLLM_LOGGING_LEVEL`."""
        if name not in _declared():
            raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
        return getattr(get(), name)


def is_set(name: str) -> bool:
    """Return whether a variable is set, so that its value is not the default of this module."""
    return bool(os.environ.get(name, "").strip())


def export(name: str, value: str) -> None:
    """Set a variable of other software in this process, before that software reads it."""
    os.environ[name] = value


def export_default(name: str, value: str) -> None:
    """Set a variable of other software in this process, unless the user has set it."""
    os.environ.setdefault(name, value)


BRIDGE_SETTINGS_MARK = "_VLLM_BRIDGE_SETTINGS"
"""Names of the settings of the bridge that this package has made, separated by commas: child
processes inherit them, and could not tell them from the user's."""


_SPELT_AS_NUMBERS = ("PT_HPU_LAZY_MODE", "PT_HPU_METRICS_GC_DETAILS")


def export_bridge_settings(is_lazy: bool | None = None) -> list[BridgeSetting]:
    """Set the variables of `BRIDGE_SETTINGS` that are not set yet, or empty, and spell the switches
    of the bridge as it documents them: a value such as `true` becomes 1.

    Args:
        is_lazy: the mode that the bridge reports; None: not known yet, so PT_HPU_LAZY_MODE decides,
            if it is set.

    Returns:
        The settings that were set now.
    """
    for name in _SPELT_AS_NUMBERS:
        if (is_on := WORDS.get(os.environ.get(name, "").strip().lower())) is not None:
            os.environ[name] = str(int(is_on))
    if is_lazy is None:
        is_lazy = _said_mode()
    made = [setting for setting in bridge_settings(is_lazy) if not os.environ.get(setting.name)]
    for setting in made:
        os.environ[setting.name] = setting.value
    if made:
        names = [name for name in os.environ.get(BRIDGE_SETTINGS_MARK, "").split(",") if name]
        os.environ[BRIDGE_SETTINGS_MARK] = ",".join(names + [setting.name for setting in made])
    return made


def described_bridge_settings(is_lazy: bool | None = None) -> dict[str, str]:
    """Describe each variable of `BRIDGE_SETTINGS` that is set, or that an engine will set.

    Returns name -> its value and who has chosen it, for the log and reports.

    Args:
        is_lazy: whether the bridge is in lazy mode; see `export_bridge_settings`.
    """
    if is_lazy is None:
        is_lazy = _said_mode()
    by_engine = os.environ.get(BRIDGE_SETTINGS_MARK, "").split(",")
    wanted = list(bridge_settings(is_lazy))
    described = {}
    for setting in BRIDGE_SETTINGS:
        if os.environ.get(setting.name):
            chooser = "engine" if setting.name in by_engine else "user"
            described[setting.name] = f"{os.environ[setting.name]} ({chooser})"
        elif setting in wanted:
            described[setting.name] = f"{setting.value} (engine)"
        elif is_lazy is None:
            described[setting.name] = f"{setting.value} (engine, unless the bridge is in lazy mode)"
    return described


def _said_mode() -> bool | None:
    """Return whether PT_HPU_LAZY_MODE asks for lazy mode; None if it is not set or not valid."""
    return WORDS.get(os.environ.get("PT_HPU_LAZY_MODE", "").strip().lower())


def of_launcher(name: str) -> str | None:
    """Return a variable that a launcher such as torchrun or Ray sets for each process, or None."""
    return os.environ.get(name)


_CHILD_MARK = "_VLLM_CHILD"


def child_environment(defaults: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process of this package.

    Args:
        defaults: values for variables that this process does not have.
        overrides: replace values of this process.
    """
    return {**defaults, **os.environ, **overrides, _CHILD_MARK: "1"}


def is_child() -> bool:
    """Return whether this is a child process of this package, whose parent reported the
    variables.
    """
    return _CHILD_MARK in os.environ


_PASSED_PREFIXES = (_PREFIX, "HCCL_", "GLOO_", "HF_", "OMP_", "KMP_", "PT_", "HABANA_", "HLS_")
_PASSED_NAMES = frozenset(
    ("QUANT_CONFIG", "LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME", BRIDGE_SETTINGS_MARK),
).union(*(reader.names for reader in OTHER_READERS if reader.is_for_workers))
_OF_ONE_MACHINE = (
    *("VLLM_HOST_IP", "HLS_MODULE_ID"),
    # Ray sets the devices of each worker in these variables.
    *("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"),
)


def passed_on() -> dict[str, str]:
    """Return the variables that workers on other machines get from this process.

    These are the variables of this package, of communication libraries, of cards, of threads and of
    the hub. Variables of a single machine and secrets are left out: everyone who can see the
    cluster could read them.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PASSED_PREFIXES) or name in _PASSED_NAMES)
        and name not in _OF_ONE_MACHINE
        and not name.endswith(_SECRET_ENDINGS)
    }


def aliases_of(name: str) -> tuple[str, ...]:
    """Return the other names of a variable, from the Gaudi plugin.

    >>> aliases_of("VLLM_PROMPT_SEQ_BUCKET_MIN"), aliases_of("VLLM_SKIP_WARMUP")
    (('VLLM_PROMPT_QUERY_BUCKET_MIN',), ())
    """
    if name.startswith(_SEQ_PREFIX):
        return (_QUERY_PREFIX + name.removeprefix(_SEQ_PREFIX),)
    return ()


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return unknown `VLLM_*` variables that are set, each with the flag that it is named after,
    the most similar known name, or None. Variables that Kubernetes sets for a service called vllm
    or vllm-... are left out.
    """
    candidates = [n.removeprefix(_PREFIX) for n in sorted(_declared()) if n.startswith(_PREFIX)]
    nearest: dict[str, str | None] = {}
    for name in _unlisted(environ):
        # Compare without the prefix, which would make any two names look similar.
        short = name.removeprefix(_PREFIX)
        if short in FLAG_NAMES:
            nearest[name] = "--" + short.lower().replace("_", "-")
        elif variable_of_feature(name) is None:
            near = difflib.get_close_matches(short, candidates, n=1, cutoff=0.7)
            nearest[name] = _PREFIX + near[0] if near else None
    return nearest


def _unlisted(environ: Mapping[str, str] | None) -> list[str]:
    """Return the `VLLM_*` variables that are set and that no list has."""
    environ = os.environ if environ is None else environ
    known = _known() | _of_services(environ)
    return [name for name in sorted(environ) if name.startswith(_PREFIX) and name not in known]


FLAG_NAMES = frozenset(
    {
        "MODEL",
        "MAX_MODEL_LEN",
        "MAX_NUM_SEQS",
        "MAX_NUM_BATCHED_TOKENS",
        "TENSOR_PARALLEL_SIZE",
        "PIPELINE_PARALLEL_SIZE",
        "DATA_PARALLEL_SIZE",
        "BLOCK_SIZE",
        "DTYPE",
        "QUANTIZATION",
        "KV_CACHE_DTYPE",
        "GPU_MEMORY_UTILIZATION",
        "SERVED_MODEL_NAME",
        "TRUST_REMOTE_CODE",
        "ENFORCE_EAGER",
        "ENABLE_EXPERT_PARALLEL",
        "ENABLE_PREFIX_CACHING",
        "ENABLE_CHUNKED_PREFILL",
        "ASYNC_SCHEDULING",
        "NUM_SCHEDULER_STEPS",
        "QUANT_CONFIG",
        "DOWNLOAD_DIR",
        "SEED",
    }
)
"""Flags whose names are often tried as variables, such as VLLM_MAX_MODEL_LEN."""


def misspelt(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that are set, do not begin with `VLLM_` and are nearly the name of a
    known variable, each with that name.

    Other names are not reported: other software may read them.
    """
    environ = os.environ if environ is None else environ
    known = _known()
    candidates = [name for name in known if name.startswith(_MISSPELT_PREFIXES)]
    found: dict[str, str] = {}
    for name in sorted(environ):
        if name.startswith(_MISSPELT_PREFIXES) and name not in known:
            for near in difflib.get_close_matches(name, candidates, n=1, cutoff=0.93):
                found[name] = near
    return found


_MISSPELT_PREFIXES = ("PT_HPU", "HABANA_VISIBLE", "QUANT_")


def _known() -> set[str]:
    """Return the names of all variables that this package lists, for itself or other software."""
    declared = _declared()
    known = declared | COMPAT_VARIABLES.keys()
    known |= {alias for name in declared for alias in aliases_of(name)}
    return known | {name for reader in OTHER_READERS for name in reader.names}


_SERVICE_HOST = "_SERVICE_HOST"


def _of_services(environ: Mapping[str, str]) -> set[str]:
    """Return the variables that Kubernetes sets in a pod for each service, such as
    VLLM_SERVICE_HOST and VLLM_PORT_80_TCP for the service vllm.
    """
    services = [
        name.removesuffix(_SERVICE_HOST)
        for name in environ
        if name.startswith(_PREFIX) and name.endswith(_SERVICE_HOST)
    ]
    forms = [rf"{re.escape(s)}_(SERVICE_(HOST|PORT)|PORT$|PORT_\d+_)" for s in services]
    return {name for name in environ if any(re.match(form, name) for form in forms)}


def without_effect(environ: Mapping[str, str] | None = None) -> list[CompatVariable]:
    """Return the variables of the Gaudi fork that are set but have no effect here."""
    of_features = [
        variable
        for name in _unlisted(environ)
        if name.removeprefix(_PREFIX) not in FLAG_NAMES
        and (variable := variable_of_feature(name)) is not None
    ]
    return [variable for variable in _asked(environ) if variable.available] + of_features


def refused(environ: Mapping[str, str] | None = None) -> list[CompatVariable]:
    """Return the variables of the Gaudi fork that are set and with which an engine must
    not start.
    """
    return [variable for variable in _asked(environ) if not variable.available]


def _asked(environ: Mapping[str, str] | None) -> list[CompatVariable]:
    environ = os.environ if environ is None else environ
    of_services = _of_services(environ)
    values = (
        (variable, environ.get(name, ""))
        for name, variable in COMPAT_VARIABLES.items()
        if name not in of_services
    )
    return [v for v, raw in values if (word := raw.strip().lower()) and not _is_same(v, word)]


def _is_same(variable: CompatVariable, word: str) -> bool:
    return variable.same_as is not None and WORDS.get(word) is variable.same_as


_REPORTED_PREFIXES = (_PREFIX, "PT_HPU", "HABANA_")
_SECRET_ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def reportable(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return every variable of this package, the fork or Habana that is set; secrets are masked."""
    environ = os.environ if environ is None else environ
    known = _declared() | COMPAT_VARIABLES.keys()
    return {
        name: "***" if name.endswith(_SECRET_ENDINGS) else environ[name]
        for name in sorted(environ)
        if name.startswith(_REPORTED_PREFIXES) or name in known
    }


def _declared() -> set[str]:
    return {f.name for f in fields(Envs)}
