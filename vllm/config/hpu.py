"""Define settings of Gaudi: buckets, warm-up, graphs, and attention.

Most values come from environment variables, under the names that users of Gaudi know. A new setting
is a field with a docstring, which becomes a flag as in the other config classes.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vllm.config.fields import check_at_least, check_one_of
from vllm.envs import Envs
from vllm.errors import ConfigError

BucketingStrategy = Literal["linear", "exponential", "sparse", "pad", "optimal"]
GraphOrder = Literal["min_tokens", "max_bs"]
PromptAttention = Literal["fused", "flex", "naive"]
SamplingWarmUp = Literal["basic", "all"]
ReadyWhen = Literal["first", "all"]
StepLog = Literal["off", "some", "all"]
"""The steps that are logged: none, steps in which something happened, or every step."""


_NO_FLAG = {"cli": False}

_MAX_SLICE_THRESHOLD = 8192
_SLICE_STEP = 1024
"""The default threshold is the budget of a step, at most the first of these; the default slice is
half of it, in steps of the second. The vendor documents both."""


VARIABLE = "variable"
"""Key in the metadata of a field that takes the value of one environment variable."""


def _variable(name: str) -> Any:
    """Declare a field whose default and value come from a variable of `envs.Envs`."""
    return field(default=getattr(Envs, name), metadata={"cli": False, VARIABLE: name})


_GC_THRESHOLDS = tuple(
    threshold * Envs.VLLM_GC_THR_MULTIPLIER
    for threshold in (Envs.VLLM_GC_THR_GEN0, Envs.VLLM_GC_THR_GEN1, Envs.VLLM_GC_THR_GEN2)
)


@dataclass(frozen=True)
class PromptSlicing:
    """Decides when the attention of a prompt runs over slices of its queries. Without sizes it
    never does.
    """

    max_keys: int | None = None
    """Maximum number of keys for which all queries run at once."""
    num_queries: int = 1
    """Number of queries in a slice."""

    def queries_at_once(self, num_queries: int, num_keys: int) -> int:
        """Return the number of queries of a prompt for which a mask is created at a time."""
        if self.max_keys is None or num_keys <= self.max_keys:
            return num_queries
        return min(num_queries, self.num_queries)


UNSLICED = PromptSlicing()


@dataclass(frozen=True, kw_only=True)
class HPUConfig:
    """Settings of Gaudi."""

    max_seq_len_to_capture: int = 8192
    """Longest sequence for which the linear strategy makes prompt buckets at every step size.
    Longer sequences have fewer buckets, so the end of such a prompt runs with more padding."""
    bucketing_strategy: BucketingStrategy = field(default="linear", metadata=_NO_FLAG)
    bucketing_file: str | None = _variable("VLLM_BUCKETING_FROM_FILE")
    """Path of a file with the buckets, which replaces the strategy."""
    traffic: str | None = None
    """File that describes your traffic. The buckets are chosen so that padding takes the least
    device time for it. The file is written by --record-traffic, or is a CSV or JSON Lines file of
    request lengths with input_tokens, output_tokens and optionally timestamp. The log shows the
    padding, and the lowest padding that any set of buckets could have."""
    num_buckets: int = 32
    """Number of prompt buckets, and of decode buckets, that are chosen for --traffic. With more
    buckets there is less padding, but the warm-up takes longer."""
    chosen_buckets: tuple[tuple[int, int, int, int], ...] = field(default=(), metadata=_NO_FLAG)
    """Buckets of the strategy optimal: phase, batch, query length and blocks."""
    chosen_lines: tuple[str, ...] = field(default=(), metadata=_NO_FLAG)
    """Lines for the log that show how good the chosen buckets are."""
    bucket_variables: tuple[tuple[str, int], ...] = field(default=(), metadata=_NO_FLAG)
    """Name and value of each variable of linear bucketing that is set."""
    merged_prefill: bool = _variable("VLLM_MERGED_PREFILL")
    """Whether the prompts of a prefill batch are concatenated into one padded sequence."""
    skip_warmup: bool = _variable("VLLM_SKIP_WARMUP")
    full_warmup: bool = _variable("VLLM_FULL_WARMUP")
    """Whether a compilation after the warm-up is an error."""
    sampling_warmup: SamplingWarmUp = "basic"
    """Sampling graphs that are compiled at the start. basic: greedy and random sampling. all:
    everything that a request can ask for. With basic, a server compiles the others while it has no
    requests; a graph that is still missing is compiled when a request first needs it, while the
    batch waits. VLLM_FULL_WARMUP implies all."""
    ready_when: ReadyWhen | None = None
    """When an engine on a card begins to accept requests. first: when the most important buckets
    are warmed up (see --first-buckets); the others follow while it serves, and until then forward
    passes have more padding. all: when all buckets are warmed up. Default: first for `vllm serve`,
    but all with VLLM_FULL_WARMUP or --sampling-warmup all; all for programs that use `LLM`."""
    first_buckets: int = 8
    """Number of prompt buckets, and of decode buckets, that are warmed up before the first request
    is accepted. More are warmed up if requests could not run otherwise."""
    warm_up_share: float = 0.1
    """Fraction (0 to 1) of the time of a busy server that the rest of the warm-up may use, between
    steps. 0: buckets are warmed up only while there are no requests."""
    warm_up_max_delay: float = 1.0
    """Maximum number of seconds that one part of the warm-up may delay a step of a busy server.
    Parts that would take longer wait until there are no requests."""
    adapt_buckets: bool = False
    """Let a server replace its buckets when its traffic changes. If a different set (with
    --num-buckets prompt buckets and as many decode buckets) would have saved more than 3 % of the
    device time of the last hour, it is warmed up between steps (see --warm-up-share and
    --warm-up-max-delay) and then replaces the current set. The log shows both events."""
    recipe_cache: str | None = _variable("PT_HPU_RECIPE_CACHE_CONFIG")
    """Folder of compiled recipes, and settings of the bridge for it."""
    graph_reserved_mem: float = _variable("VLLM_GRAPH_RESERVED_MEM")
    """Fraction of the usable memory for HPU graphs."""
    graph_prompt_ratio: float = _variable("VLLM_GRAPH_PROMPT_RATIO")
    """Fraction of the graph memory for prompt graphs."""
    graph_prompt_strategy: GraphOrder = _variable("VLLM_GRAPH_PROMPT_STRATEGY")
    graph_decode_strategy: GraphOrder = _variable("VLLM_GRAPH_DECODE_STRATEGY")
    contiguous_pa: bool = field(default=False, metadata=_NO_FLAG)
    """Whether decode attention reads the KV cache as one contiguous slice; with prefix caching,
    only if that costs less."""
    prompt_attention: PromptAttention = field(default="fused", metadata=_NO_FLAG)
    fp8_prompts: bool = _variable("VLLM_PROMPT_USE_FP8_FUSEDSDPA")
    """Whether prompts use fused attention in FP8, in layers that have measured scales and an fp8
    cache."""
    slices_prompts: bool | None = _variable("VLLM_HPU_FSDPA_SLICE_ENABLED")
    """Whether fused attention of long prompts runs over slices of their queries. None: with
    padding-aware buckets, unless prompts are merged."""
    max_unsliced_keys: int | None = _variable("VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD")
    """Tokens of a prompt, with its context, above which it is sliced. None:
    max_num_batched_tokens."""
    queries_of_slice: int | None = _variable("VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE")
    softmax_const_norm: float | None = field(default=None, metadata=_NO_FLAG)
    """Constant that decode attention subtracts from all scores in the softmax. None:
    `pa_softmax_impl` decides."""
    pa_softmax_impl: str | None = _variable("VLLM_PA_SOFTMAX_IMPL")
    """Names of the values that decode attention subtracts from scores in the softmax. None: the
    largest score of each block."""
    fused_block_softmax: bool = _variable("VLLM_FUSED_BLOCK_SOFTMAX")
    """Whether decode attention computes the softmax of each block with a fused kernel of the card,
    if the card has one."""
    fused_block_softmax_adjustment: bool = _variable("VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT")
    """Whether decode attention combines the softmax of the blocks of a request with a fused kernel
    of the card, if the card has one. False: with torch operators."""
    hidden_layers_per_graph: int = _variable("VLLM_CONFIG_HIDDEN_LAYERS")
    """Number of decoder layers after which lazy mode ends a recorded graph. It has no effect with
    several cards, where a graph ends before each all-reduce."""
    regional_compilation: bool = _variable("VLLM_REGIONAL_COMPILATION")
    compile_fullgraph: bool = _variable("VLLM_T_COMPILE_FULLGRAPH")
    compile_dynamic_shapes: bool = _variable("VLLM_T_COMPILE_DYNAMIC_SHAPES")
    gc_thresholds: tuple[int, ...] = field(default=_GC_THRESHOLDS, metadata=_NO_FLAG)
    """Thresholds for `gc.set_threshold` in the worker. Default: 16 times Python's own, because a
    step makes many objects and hardly ever a cycle."""
    encoder_sizes: str | None = _variable("VLLM_MULTIMODAL_BUCKETS")
    """Padded sizes of forward passes of an image encoder, as its variable gives them; see
    `multimodal_buckets`."""
    profiled_launch: str | None = field(default=None, metadata=_NO_FLAG)
    """The forward pass that is profiled instead of starting the engine; see
    `vllm.bucketing.strategies.profiled`."""
    log_compilations: StepLog = field(default="off", metadata=_NO_FLAG)
    log_recipes: bool = _variable("PT_HPU_METRICS_GC_DETAILS")
    """Whether a report of compilations lists the recipes, with their times."""
    log_cpu_fallbacks: StepLog = field(default="off", metadata=_NO_FLAG)

    def __post_init__(self) -> None:
        check_one_of(self, "bucketing_strategy", get_args(BucketingStrategy))
        check_one_of(self, "sampling_warmup", ("basic", "all"))
        check_one_of(self, "prompt_attention", ("fused", "flex", "naive"))
        if self.ready_when is not None:
            check_one_of(self, "ready_when", get_args(ReadyWhen))
        check_at_least(self, 1, "max_seq_len_to_capture", "num_buckets", "first_buckets")
        if not 0 <= self.warm_up_share <= 1:
            raise ConfigError(f"warm_up_share must be between 0 and 1, got {self.warm_up_share}")
        if not self.warm_up_max_delay >= 0:
            raise ConfigError(
                f"warm_up_max_delay must be at least 0 seconds, got {self.warm_up_max_delay}"
            )
        if self.ready_when == "first" and self.full_warmup:
            raise ConfigError(
                "ready_when='first' cannot be used with VLLM_FULL_WARMUP=true, which allows no "
                "warm-up after the start. Leave out one of them"
            )
        if self.full_warmup and self.skip_warmup:
            raise ConfigError(
                "VLLM_FULL_WARMUP=true makes a compilation after the warm-up an error, and "
                "VLLM_SKIP_WARMUP=true leaves the warm-up out. Unset one of them"
            )
        for name, is_set in (
            ("VLLM_FULL_WARMUP", self.full_warmup),
            ("VLLM_SKIP_WARMUP", self.skip_warmup),
        ):
            if self.adapt_buckets and is_set:
                raise ConfigError(
                    f"adapt_buckets=True cannot be used with {name}=true, which allows no warm-up "
                    "after the start. Leave out one of them"
                )
        _ = self.multimodal_buckets
        if self.pa_softmax_impl:
            read_normalisers(self.pa_softmax_impl)

    @property
    def serves_while_warming(self) -> bool:
        """Whether requests are accepted before all buckets are warmed up."""
        return self.ready_when == "first" and not self.skip_warmup

    @property
    def multimodal_buckets(self) -> tuple[int, ...]:
        """Padded sizes of forward passes of an encoder, in images or patches; empty: the model
        decides.

        Raises:
            ConfigError: the variable is not a list of positive integers.
        """
        text = (self.encoder_sizes or "").strip()
        # Required: without fixed sizes, each image size would be compiled.
        if text.lower() in ("", "none"):
            return ()
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(
                "VLLM_MULTIMODAL_BUCKETS must be positive integers separated by commas, such as "
                f"1600,3136,4096, or None, got {text!r}"
            )
        return tuple(sorted({int(part) for part in parts}))

    def prompt_slicing(self, max_num_batched_tokens: int) -> PromptSlicing:
        """Return the settings for attention in slices, for this token budget per step."""
        is_on = self.slices_prompts
        if is_on is None:
            is_on = self.bucketing_strategy == "pad" and not self.merged_prefill
        if not is_on or self.prompt_attention != "fused":
            return UNSLICED
        most = self.max_unsliced_keys or min(max_num_batched_tokens, _MAX_SLICE_THRESHOLD)
        half = -(-most // (2 * _SLICE_STEP)) * _SLICE_STEP
        return PromptSlicing(most, self.queries_of_slice or half)


NORMALISER_NAMES = (
    *("amax", "head_amax", "wsum", "wsum_head_amax"),
    *("index_reduce", "scatter_reduce"),
)
"""Accepted words of VLLM_PA_SOFTMAX_IMPL; `attention.backends.normalisers` computes them."""


def read_normalisers(names: str) -> list[str]:
    """Return the words of VLLM_PA_SOFTMAX_IMPL, a comma-separated list.

    Raises:
        ConfigError: a word is unknown.
    """
    stripped = [name.strip() for name in names.split(",")]
    for name in stripped:
        if name not in NORMALISER_NAMES:
            known = ", ".join(NORMALISER_NAMES)
            raise ConfigError(f"VLLM_PA_SOFTMAX_IMPL: {name!r} is unknown; accepted: {known}")
    return stripped
