"""Read the Gaudi settings from environment variables, and check them against each other."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import cast

from vllm import envs
from vllm.bucketing.catalog.bucket_plan import prompt_budgets
from vllm.bucketing.settings import BUCKET_VARIABLES
from vllm.bucketing.strategies.profiled import parse_profiled
from vllm.config import VllmConfig
from vllm.config.hpu import (
    UNSLICED,
    VARIABLE,
    BucketingStrategy,
    HPUConfig,
    PromptAttention,
    StepLog,
)
from vllm.env.fields import LARGEST
from vllm.env.recipe_folder import RecipeFolder
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms.hpu import HPUPlatform

logger = init_logger(__name__)

_MAX_PADDING = 8
"""Maximum size of the smallest prompt bucket, in steps of the largest real size."""
_STRATEGIES: dict[str, BucketingStrategy] = {"lin": "linear", "exp": "exponential"}


def resolve_hpu_config(asked: HPUConfig, *, has_slices: bool = True) -> HPUConfig:
    """Read the Gaudi settings of this process.

    Args:
        asked: settings with flags, which are kept; fields for environment variables are read from
            the environment.
        has_slices: default of VLLM_CONTIGUOUS_PA: whether decodes read slices of the KV cache,
            because its blocks can be kept together or no prefixes are cached.

    Raises:
        ConfigError: two variables contradict each other, or one of the Gaudi fork requests a
            missing feature that changes results.
    """
    refuse_variables()
    settings = envs.get()
    RecipeFolder.parse(settings.PT_HPU_RECIPE_CACHE_CONFIG)  # checks it
    contiguous_pa = settings.VLLM_CONTIGUOUS_PA
    as_they_are = {
        f.name: getattr(settings, f.metadata[VARIABLE])
        for f in fields(HPUConfig)
        if VARIABLE in f.metadata
    }
    return replace(
        asked,
        **as_they_are,
        bucketing_strategy=_strategy(settings, asked.traffic),
        bucket_variables=bucket_variables(settings),
        contiguous_pa=has_slices if contiguous_pa is None else contiguous_pa,
        prompt_attention=_prompt_attention(settings),
        softmax_const_norm=_const_norm(settings),
        gc_thresholds=_gc_thresholds(settings),
        profiled_launch=_profiled_launch(settings),
        log_compilations=_step_log(
            settings.VLLM_HPU_LOG_STEP_GRAPH_COMPILATION,
            settings.VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL,
        ),
        log_cpu_fallbacks=_step_log(
            settings.VLLM_HPU_LOG_STEP_CPU_FALLBACKS, settings.VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL
        ),
    )


def check_simulation(hpu: HPUConfig, platform: HPUPlatform) -> None:
    """Refuse features that a simulated card cannot run.

    Raises:
        ConfigError: flex_attention is requested for prompts.
    """
    if hpu.prompt_attention == "flex" and platform.is_simulated:
        raise ConfigError(
            "VLLM_PROMPT_USE_FLEX_ATTENTION=1 cannot run on a simulated card, whose tensors "
            "torch's flex_attention does not support. Unset it. VLLM_PROMPT_USE_FUSEDSDPA=0 then "
            "uses plain matmuls, and otherwise the fused kernel is used"
        )


def check_launcher(config: VllmConfig) -> None:
    """Refuse to postpone the warm-up of buckets if no server loop would warm them up later.

    Raises:
        ConfigError: another program has started the processes of the engine.
    """
    if (
        config.hpu.ready_when == "first"
        and config.parallel.distributed_executor_backend == "external_launcher"
    ):
        raise ConfigError(
            "ready_when='first' cannot be used with "
            "distributed_executor_backend='external_launcher', where no bucket can be warmed up "
            "after the start. Use ready_when='all', or leave it out"
        )


@dataclass(frozen=True)
class _Idle:
    """Variables that have no effect with some other settings."""

    names: tuple[str, ...]
    reason: str
    """Clause without a full stop."""
    is_idle: Callable[[envs.Envs, HPUConfig, bool], bool]
    """Function of the variables, the Gaudi settings, and whether the model runs eagerly."""


_SLICES = ("VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD", "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE")
_GRAPH_ORDERS = ("VLLM_GRAPH_PROMPT_STRATEGY", "VLLM_GRAPH_DECODE_STRATEGY")
_IDLE = (
    _Idle(
        ("VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING", *BUCKET_VARIABLES),
        "VLLM_BUCKETING_FROM_FILE has the buckets",
        lambda _, hpu, __: hpu.bucketing_file is not None,
    ),
    _Idle(
        (*_SLICES, "VLLM_HPU_FSDPA_SLICE_ENABLED", "VLLM_PROMPT_USE_FP8_FUSEDSDPA"),
        "prompts do not use fused attention (VLLM_PROMPT_USE_FUSEDSDPA)",
        lambda _, hpu, __: hpu.prompt_attention != "fused",
    ),
    _Idle(
        _SLICES,
        "prompts are not sliced; set VLLM_HPU_FSDPA_SLICE_ENABLED=1",
        lambda _, hpu, __: hpu.prompt_attention == "fused" and hpu.prompt_slicing(1) == UNSLICED,
    ),
    _Idle(
        ("VLLM_SOFTMAX_CONST_NORM_VALUE",),
        "VLLM_SOFTMAX_CONST_NORM is not set",
        lambda settings, *_: not settings.VLLM_SOFTMAX_CONST_NORM,
    ),
    _Idle(
        ("VLLM_FUSED_BLOCK_SOFTMAX",),
        "it needs VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT=1",
        lambda settings, *_: not settings.VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT,
    ),
    _Idle(
        (
            *("VLLM_T_COMPILE_FULLGRAPH", "VLLM_T_COMPILE_DYNAMIC_SHAPES"),
            "VLLM_REGIONAL_COMPILATION",
        ),
        "torch.compile is not used (PT_HPU_LAZY_MODE=1 or --enforce-eager)",
        lambda settings, _, is_eager: is_eager or settings.PT_HPU_LAZY_MODE is True,
    ),
    _Idle(
        (*_GRAPH_ORDERS, "VLLM_GRAPH_PROMPT_RATIO", "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"),
        "HPU graphs are not used (PT_HPU_LAZY_MODE=0 or --enforce-eager)",
        lambda settings, _, is_eager: is_eager or settings.PT_HPU_LAZY_MODE is False,
    ),
    _Idle(
        ("VLLM_GRAPH_RESERVED_MEM",),
        "with --enforce-eager no memory is reserved",
        lambda *given: given[-1],
    ),
    _Idle(
        _GRAPH_ORDERS,
        "VLLM_SKIP_WARMUP leaves out the warm-up, which captures graphs in this order",
        lambda settings, *_: settings.VLLM_SKIP_WARMUP,
    ),
    _Idle(
        (
            "VLLM_HPU_SIM_STRICT",
            "VLLM_HPU_SIM_VENDOR",
            "VLLM_HPU_SIM_BRIDGE",
            "VLLM_HPU_SIM_ABSENT",
        ),
        "the card is not simulated (VLLM_HPU_SIM)",
        lambda settings, *_: not (settings.VLLM_HPU_SIM or settings.VLLM_USE_FAKE_HPU),
    ),
    _Idle(
        ("VLLM_CONFIG_HIDDEN_LAYERS",),
        "it is for lazy mode (PT_HPU_LAZY_MODE=1)",
        lambda settings, *_: settings.PT_HPU_LAZY_MODE is False,
    ),
)


def warn_of_idle_variables(hpu: HPUConfig, *, is_eager: bool) -> None:
    """Log a warning for each variable that other settings leave without effect.

    Args:
        hpu: the settings.
        is_eager: whether the model runs eagerly.
    """
    settings = envs.get()
    for idle in _IDLE:
        if not idle.is_idle(settings, hpu, is_eager):
            continue
        for name in idle.names:
            if (value := getattr(settings, name)) != getattr(envs.Envs, name):
                text = envs.of_launcher(name) or value
                logger.warning("%s=%s has no effect: %s", name, text, idle.reason)
    if hpu.skip_warmup and hpu.sampling_warmup == "all":
        logger.warning(
            "sampling_warmup='all' has no effect: VLLM_SKIP_WARMUP leaves out the warm-up"
        )


def fit_token_budget(config: VllmConfig, *, is_given: bool) -> VllmConfig:
    """Return the config with a token budget per step that fits the smallest prompt bucket.

    If the user did not set the budget, it becomes the size of the longest bucket, so that prompts
    with a bucket of 32,768 tokens are not split at the default budget.

    Args:
        config: config for a Gaudi card.
        is_given: the user has set max_num_batched_tokens.

    Raises:
        ConfigError: the variables leave no bucket or only huge ones, or the bucket file cannot be
            read.
    """
    scheduler, budgets = config.scheduler, prompt_budgets(config)
    if budgets is None:
        return config
    smallest, largest = budgets
    budget = smallest if is_given else largest
    longest = max(scheduler.max_num_batched_tokens, scheduler.max_model_len)
    if smallest > _MAX_PADDING * longest:
        raise ConfigError(
            f"the smallest prompt bucket has {smallest} tokens, but max_num_batched_tokens and "
            f"max_model_len are at most {longest}, so nearly all of it would be padding. Lower "
            f"VLLM_PROMPT_SEQ_BUCKET_MIN or VLLM_PROMPT_BS_BUCKET_MIN, or add smaller buckets to "
            f"VLLM_BUCKETING_FROM_FILE"
        )
    logger.warning(
        "max_num_batched_tokens is raised from %d to %d: the smallest prompt bucket has %d tokens. "
        "To keep it, lower VLLM_PROMPT_SEQ_BUCKET_MIN or VLLM_PROMPT_BS_BUCKET_MIN",
        scheduler.max_num_batched_tokens,
        budget,
        smallest,
    )
    return replace(config, scheduler=replace(scheduler, max_num_batched_tokens=budget))


def refuse_variables() -> None:
    """Refuse variables of the Gaudi fork that request missing features that change results.

    Raises:
        ConfigError: such a variable is set.
    """
    for variable in envs.refused():
        raise ConfigError(
            f"environment variable {variable.name} is not supported in this version: "
            f"{variable.reason}. Unset it"
        )


def bucket_variables(settings: envs.Envs) -> tuple[tuple[str, int], ...]:
    """Return the variables of linear bucketing that are set."""
    values = ((name, getattr(settings, name)) for name in BUCKET_VARIABLES)
    return tuple((name, value) for name, value in values if value is not None)


def _strategy(settings: envs.Envs, traffic: str | None) -> BucketingStrategy:
    name = settings.VLLM_BUCKETING_STRATEGY
    strategy = _STRATEGIES.get(name, cast(BucketingStrategy, name))
    if traffic is not None:
        if strategy not in ("linear", "optimal") or settings.VLLM_EXPONENTIAL_BUCKETING:
            raise ConfigError(
                f"--traffic {traffic} chooses the buckets, but VLLM_BUCKETING_STRATEGY={name} or "
                "VLLM_EXPONENTIAL_BUCKETING asks for others. Unset the variable, or leave out "
                "--traffic."
            )
        if settings.VLLM_BUCKETING_FROM_FILE is not None:
            raise ConfigError(
                f"--traffic {traffic} chooses the buckets, but "
                f"VLLM_BUCKETING_FROM_FILE={settings.VLLM_BUCKETING_FROM_FILE} has others. Leave "
                "out one of them."
            )
        return "optimal"
    if settings.VLLM_EXPONENTIAL_BUCKETING is None:
        return strategy
    asked: BucketingStrategy = "exponential" if settings.VLLM_EXPONENTIAL_BUCKETING else "linear"
    if strategy != asked and envs.is_set("VLLM_BUCKETING_STRATEGY"):
        logger.warning(
            "VLLM_EXPONENTIAL_BUCKETING=%d overrides VLLM_BUCKETING_STRATEGY=%s",
            settings.VLLM_EXPONENTIAL_BUCKETING,
            name,
        )
    return asked


def _prompt_attention(settings: envs.Envs) -> PromptAttention:
    if not settings.VLLM_PROMPT_USE_FLEX_ATTENTION:
        return "fused" if settings.VLLM_PROMPT_USE_FUSEDSDPA else "naive"
    if settings.VLLM_PROMPT_USE_FUSEDSDPA:
        raise ConfigError(
            "VLLM_PROMPT_USE_FLEX_ATTENTION=1 needs VLLM_PROMPT_USE_FUSEDSDPA=0, because prompts "
            "can use only one of them"
        )
    return "flex"


def _gc_thresholds(settings: envs.Envs) -> tuple[int, ...]:
    """Return the garbage collection thresholds: the given values, or Python's defaults times the
    multiplier.
    """
    names = ("VLLM_GC_THR_GEN0", "VLLM_GC_THR_GEN1", "VLLM_GC_THR_GEN2")
    is_default = all(getattr(settings, name) == getattr(envs.Envs, name) for name in names)
    factor = settings.VLLM_GC_THR_MULTIPLIER if is_default else 1
    return tuple(min(getattr(settings, name) * factor, LARGEST) for name in names)


def _profiled_launch(settings: envs.Envs) -> str | None:
    """Return the forward pass to profile, in the format of VLLM_PT_PROFILE."""
    found = [settings.VLLM_PT_PROFILE] if settings.VLLM_PT_PROFILE else []
    lists = (
        ("VLLM_PROFILE_PROMPT", settings.VLLM_PROFILE_PROMPT, "prompt", 3),
        ("VLLM_PROFILE_DECODE", settings.VLLM_PROFILE_DECODE, "decode", 2),
    )
    for name, text, phase, num_sizes in lists:
        if text is None:
            continue
        sizes = [size.strip() for size in text.split(",")]
        if len(sizes) != num_sizes or not all(size.isdecimal() for size in sizes):
            form = "1,512,0: batch, length and blocks of context"
            form = form if phase == "prompt" else "4,128: batch and blocks"
            raise ConfigError(f"{name}={text!r} must be like {form}")
        found.append("_".join([phase, *sizes, "t"]))
    if len(found) > 1:
        raise ConfigError(
            "VLLM_PT_PROFILE, VLLM_PROFILE_PROMPT and VLLM_PROFILE_DECODE each name the only "
            "forward pass to profile. Set one of them"
        )
    for text in found:
        parse_profiled(text)
        return text
    return None


def _const_norm(settings: envs.Envs) -> float | None:
    if not settings.VLLM_SOFTMAX_CONST_NORM:
        return None
    if settings.VLLM_PA_SOFTMAX_IMPL is not None:
        raise ConfigError(
            "VLLM_SOFTMAX_CONST_NORM=1 and VLLM_PA_SOFTMAX_IMPL cannot be used together: both "
            "choose how the softmax of decode attention is normalised. Unset one of them"
        )
    return settings.VLLM_SOFTMAX_CONST_NORM_VALUE


def _step_log(some: bool, every: bool) -> StepLog:
    if every:
        return "all"
    return "some" if some else "off"
