"""Resolve speculative decoding: the draft model, whether drafts are possible, and settings that
depend on them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, SchedulerConfig, SpeculativeConfig
from vllm.config.speculative import KEYS_WITHOUT_EFFECT
from vllm.engine.resolve.model_options import resolve_quantization
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms import Platform

logger = init_logger(__name__)


def asked_draft_model(
    speculative: SpeculativeConfig, model: ModelConfig, platform: Platform
) -> ModelConfig | None:
    """Return the draft model that the user asked for, not yet resolved; None if there is none."""
    options = speculative.drafts
    if options is None or options.method != "draft_model" or model.pooler is not None:
        return None
    if not platform.can_run_draft_models:
        return None
    return ModelConfig(
        model=options.model or "",
        revision=options.revision,
        quantization=options.quantization,
        lm_head_quantization=model.lm_head_quantization,
        max_model_len=options.max_model_len or None,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        enforce_eager=model.enforce_eager,
        seed=model.seed,
    )


def check_draft_model(draft: ModelConfig, model: ModelConfig, platform: Platform) -> ModelConfig:
    """Check the draft model, and limit its length to the length of the model.

    Raises:
        ConfigError: it cannot draft for this model.
    """
    name = f"speculative_config: the draft model '{draft.model}'"
    if draft.pooler is not None:
        raise ConfigError(f"{name} does not generate text. Name one that does")
    if draft.resolved_arch.has_states:
        raise ConfigError(
            f"{name} has recurrent (Mamba or DeltaNet) layers, whose state cannot be rolled back "
            "after a rejected draft token. Name a model without them, or use the method ngram"
        )
    try:
        draft = resolve_quantization(draft, platform)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    sizes = draft.resolved_arch.vocab_size, model.resolved_arch.vocab_size
    if draft.tokenizer is not None and model.tokenizer is not None:
        vocabularies = _vocabulary(draft.tokenizer), _vocabulary(model.tokenizer)
        if None not in vocabularies:
            if vocabularies[0] == vocabularies[1]:
                return draft  # the sizes may differ, because vocabularies can be padded
            raise ConfigError(
                f"{name} does not have the tokenizer of the model '{model.model}'. Name a model "
                "of the same family, or use the method ngram"
            )
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{name} has a vocabulary of {sizes[0]} tokens, but the model '{model.model}' has "
            f"{sizes[1]}. Name a draft model with the same tokenizer, or use the method ngram"
        )
    return draft


def resolve_lookup(
    speculative: SpeculativeConfig, scheduler: SchedulerConfig, platform: Platform
) -> SpeculativeConfig:
    """Return the settings with the platform's default number of lookup drafts, if the user set
    none.
    """
    options, given = speculative.drafts, speculative.speculative_config
    if options is None or options.method not in ("ngram", "suffix"):
        return speculative
    if given.get("num_speculative_tokens"):
        return speculative
    most = platform.max_lookup_drafts(scheduler.max_num_seqs)
    return replace(speculative, speculative_config={**given, "num_speculative_tokens": most})


def max_draft_tokens(speculative: SpeculativeConfig, model: ModelConfig, platform: Platform) -> int:
    """Return the number of drafts that a step verifies for one request; 0: no drafts."""
    drafts = speculative.drafts
    for key, value in speculative.speculative_config.items():
        if key in KEYS_WITHOUT_EFFECT and value is not None:
            logger.warning(
                "speculative_config: %s=%s has no effect: %s", key, value, KEYS_WITHOUT_EFFECT[key]
            )
    reason = None
    if speculative.method == "draft_model" and not platform.can_run_draft_models:
        reason = f"a draft model does not run on the device {platform.name!r} in this version"
    if reason is not None:
        logger.warning(
            "speculative_config=%s has no effect: %s. Outputs are the same without drafts. The "
            "methods ngram and suffix have an effect",
            dict(speculative.speculative_config),
            reason,
        )
        return 0
    if drafts is None or model.pooler is not None:
        return 0
    return drafts.num_speculative_tokens


def resolve_decodes(scheduler: SchedulerConfig, num_stages: int) -> SchedulerConfig:
    """Return the limits of a step, with one decode per step if several are not possible.

    Args:
        scheduler: limits with the final max_draft_tokens.
        num_stages: number of pipeline stages.
    """
    steps, reason = scheduler.num_scheduler_steps, None
    if scheduler.max_draft_tokens:
        reason = "with speculative_config a step verifies drafts instead"
    elif num_stages > 1:
        reason = f"with pipeline_parallel_size={num_stages} a stage does not know the newest tokens"
    if steps == 1 or reason is None:
        return scheduler
    logger.warning("num_scheduler_steps=%s has no effect: %s; outputs are the same", steps, reason)
    return replace(scheduler, num_scheduler_steps=1)


def _vocabulary(folder: str) -> dict[str, int] | None:
    """Return the tokens of a tokenizer and their ids; None if the folder has no tokenizer.json that
    lists them.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"))
        vocabulary = content["model"]["vocab"]
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError):
        return None  # loading the tokenizer later reports the error
    return {**vocabulary, **added} if isinstance(vocabulary, dict) else None
