"""Loading a tokenizer. transformers is imported at the first call: it is slow to import."""

from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig
from vllm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of an engine, or None where it shall work without one.

    Raises:
        ConfigError: there is none, or its files are damaged.
    """
    if model.skip_tokenizer_init:
        return None
    return get_tokenizer(
        model.tokenizer or model.resolved_path,
        tokenizer_mode=model.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
    )


def get_tokenizer(
    tokenizer_name: str,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **kwargs: Any,
) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local folder or of a model on the Hugging Face hub.

    Args:
        tokenizer_name: folder or hub name.
        tokenizer_mode: "auto", or "slow" to prefer the Python implementation where the installed
            transformers has one.
        trust_remote_code: run Python code that comes with the tokenizer.
        revision: branch, tag or commit on the hub.
        kwargs: passed on to `AutoTokenizer.from_pretrained`.

    Raises:
        ConfigError: there is none, or its files are damaged.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_name,
            use_fast=tokenizer_mode != "slow",
            trust_remote_code=trust_remote_code,
            revision=revision,
            **kwargs,
        )
    except Exception as error:  # tokenizers raises a plain Exception for a damaged file
        raise ConfigError(_failure(tokenizer_name, str(error) or repr(error))) from error
    if len(tokenizer) == 0:
        raise ConfigError(_failure(tokenizer_name, "its vocabulary is empty"))
    result: PreTrainedTokenizerBase = tokenizer
    return result


def _failure(tokenizer_name: str, reason: str) -> str:
    first_line = reason.strip().splitlines()[0].rstrip(" :")
    return (
        f"no usable tokenizer in {tokenizer_name!r}: {first_line}. Name one with tokenizer=..., "
        f"or set skip_tokenizer_init to work with token ids only"
    )
