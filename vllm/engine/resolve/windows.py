"""Models with sliding windows that are run without them (`disable_sliding_window`)."""

from dataclasses import replace

from vllm.config import ModelArch, ModelConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)


def resolve_windows(asked: ModelConfig, arch: ModelArch) -> tuple[ModelArch, int | None]:
    """The model with full attention in every layer, if that was asked for, and its new limit.

    Up to the length of its smallest window a model computes the same with and without windows.

    Returns:
        The model, and the longest request in tokens; None where the windows set no limit.

    Raises:
        ConfigError: a longer `max_model_len` was asked for.
    """
    windows = [window for window in arch.layer_windows if window is not None]
    if not asked.disable_sliding_window or not windows:
        return arch, None
    limit = min(windows)
    if asked.max_model_len is not None and asked.max_model_len > limit:
        raise ConfigError(
            f"max_model_len ({asked.max_model_len}) is more than the {limit} tokens of the model's "
            f"sliding window, which are the limit with disable_sliding_window. Lower max_model_len "
            f"to {limit}, or leave disable_sliding_window out"
        )
    if asked.max_model_len is None and limit < arch.derived_max_model_len:
        logger.info(
            "max_model_len is %d, the length of the model's sliding window, and not %d "
            "(disable_sliding_window)",
            limit,
            arch.derived_max_model_len,
        )
    return replace(arch, layer_windows=(None,) * arch.num_layers), limit
