"""Decide the task of a model and its pooling, from the architecture, model files and user
settings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from vllm.config import ModelArch, ModelConfig, PoolerConfig
from vllm.config.families import family_of_architecture
from vllm.config.pooler import Activation, ModelTask, PoolingTask, PoolingType
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.models.registry import is_encoder
from vllm.transformers_utils.sentence_transformers_config import (
    SentenceTransformersConfig,
    read_sentence_transformers_config,
)

logger = init_logger(__name__)

_OVERRIDES = ("pooling_type", "normalize", "softmax", "step_tag_id", "returned_token_ids")
_CLASSIFIER = "ForSequenceClassification"


def resolve_pooler(
    asked: ModelConfig, arch: ModelArch, folder: Path
) -> tuple[PoolerConfig | None, int | None]:
    """Return the pooling of the model, and the maximum length in tokens that its files recommend.

    The pooling is None if the model generates text.

    Raises:
        ConfigError: the model cannot do the task, or `override_pooler_config` is wrong.
    """
    modules = None
    if asked.task in ("auto", "pooling", "embed", "embedding"):
        modules = read_sentence_transformers_config(folder)
    can_do = _tasks_of(arch, has_modules=modules is not None)
    task = can_do[0] if asked.task == "auto" else asked.task.replace("embedding", "embed")
    if asked.task == "pooling":
        task = next(each for each in can_do if each != "generate")
    if task not in can_do:
        raise ConfigError(
            f"task={asked.task!r} is not available for {arch.architecture}; available: "
            f"{', '.join(can_do)}"
        )
    if task == "generate":
        if asked.override_pooler_config:
            raise ConfigError(
                f"override_pooler_config has no effect with task 'generate'. Leave it out, or set "
                f"another task; {arch.architecture} can do: {', '.join(can_do)}"
            )
        return None, None
    if task != "embed":
        modules = None
    values = _defaults(cast(PoolingTask, task), arch, modules)
    values.update(_overrides(asked.override_pooler_config))
    return PoolerConfig(**values), None if modules is None else modules.max_seq_length


def _tasks_of(arch: ModelArch, *, has_modules: bool) -> tuple[ModelTask, ...]:
    """Return the tasks of an architecture; the first one is the default."""
    name = arch.architecture
    if name.endswith(_CLASSIFIER):
        is_scorer = len(_labels(arch)) == 1
        if not is_scorer:
            return ("classify",)
        return ("score", "classify") if is_encoder(name) else ("classify", "score")
    if name.endswith("RewardModel"):
        return ("reward",)
    if name.endswith("Model") and not _generates(name):
        return ("embed",)
    return ("embed", "generate") if has_modules else ("generate", "embed")


def _generates(name: str) -> bool:
    """Return whether an architecture whose name ends in Model generates text."""
    family = family_of_architecture(name)
    is_decoder = name in family.architectures and not family.is_encoder
    return is_decoder or name.endswith("LMHeadModel")


def _defaults(
    task: PoolingTask, arch: ModelArch, modules: SentenceTransformersConfig | None
) -> dict[str, Any]:
    is_causal = not is_encoder(arch.architecture)
    pooling_type: PoolingType = "LAST" if is_causal else "CLS"
    activation: Activation = "none"
    labels: tuple[str, ...] = ()
    step_tag_id = None
    if task == "reward":
        pooling_type = "ALL"
        if arch.architecture.endswith("ForProcessRewardModel"):
            step_tag_id = family_of_architecture(arch.architecture).step_token_id
        if step_tag_id is not None:
            pooling_type, activation = "STEP", "softmax"
    elif task == "embed":
        activation = "normalize"
        if modules is not None:
            pooling_type = modules.pooling_type
            activation = "normalize" if modules.normalize else "none"
    else:
        labels = _labels(arch)
        activation = _classifier_activation(arch, labels)
    config = arch.hf_config
    sizes = config.get("matryoshka_dimensions") or ()
    return {
        "task": task,
        "pooling_type": pooling_type,
        "activation": activation,
        "is_causal": is_causal,
        "step_tag_id": step_tag_id,
        "labels": labels,
        "is_matryoshka": task == "embed" and bool(config.get("is_matryoshka") or sizes),
        "matryoshka_dimensions": tuple(sorted(int(size) for size in sizes)),
    }


def _labels(arch: ModelArch) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in order; two default names, as in transformers,
    if config.json has none.
    """
    names: Mapping[Any, Any] = arch.hf_config.get("id2label") or {}
    count = len(names) or int(arch.hf_config.get("num_labels") or 2)
    by_index = {int(index): str(name) for index, name in names.items()}
    return tuple(by_index.get(index, f"LABEL_{index}") for index in range(count))


def _classifier_activation(arch: ModelArch, labels: tuple[str, ...]) -> Activation:
    """Return the classifier activation that config.json sets, for sentence-transformers or
    transformers.
    """
    config = arch.hf_config
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        known: dict[str, Activation] = {
            "Identity": "none",
            "Sigmoid": "sigmoid",
            "Softmax": "softmax",
        }
        kind = str(named).rpartition(".")[2]
        if kind not in known:
            raise ConfigError(
                f"config.json names the unsupported activation function {named!r}; available: "
                f"{', '.join(known)}"
            )
        return known[kind]
    if config.get("problem_type") == "regression":
        return "none"
    if len(labels) == 1 or config.get("problem_type") == "multi_label_classification":
        return "sigmoid"
    return "softmax"


def _overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := [name for name in given if name not in _OVERRIDES]:
        raise ConfigError(
            f"override_pooler_config has the unknown key {', '.join(map(repr, unknown))}; "
            f"accepted: {', '.join(_OVERRIDES)}"
        )
    values = {name: value for name, value in given.items() if value is not None}
    for name in ("normalize", "softmax"):
        is_on = values.pop(name, None)
        if is_on is None:
            continue
        if not isinstance(is_on, bool):
            raise ConfigError(
                f"{name} of override_pooler_config must be true or false, got {is_on!r}"
            )
        if is_on or "activation" not in values:
            values["activation"] = name if is_on else "none"
    ids = values.get("returned_token_ids", ())
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(
            f"returned_token_ids of override_pooler_config must be a list of integers of at "
            f"least 0, got {ids!r}"
        )
    if type(values.get("step_tag_id", 0)) is not int:
        raise ConfigError(
            f"step_tag_id of override_pooler_config must be an integer, "
            f"got {values['step_tag_id']!r}"
        )
    if "pooling_type" in values:
        values["pooling_type"] = str(values["pooling_type"]).upper()
    if "returned_token_ids" in values:
        values["returned_token_ids"] = tuple(ids)
    return values


def for_pooling(settings: Mapping[str, Any], pooler: PoolerConfig) -> Mapping[str, Any]:
    """Return the settings for pooling, without a limit for the time of a step, because no request
    generates.

    If all tokens of a prompt are pooled, the prompt has to run in one step.
    """
    settings = {**settings, "max_step_ms": 0}
    if not pooler.needs_whole_prompts:
        return settings
    logger.info(
        "chunked prefill and prefix caching are off: this model pools all tokens of a prompt, so "
        "they have to be computed in one step"
    )
    return {**settings, "enable_chunked_prefill": False, "enable_prefix_caching": False}
