"""Describes why a model does not fit a device, and the nearest setting with which it does."""

from vllm.bucketing import format_bytes
from vllm.cost_model.cards import CARDS, NUMBERS_OF_CARDS
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.planning.engine_plan import EnginePlan, make_engine_plan, weight_format, weights_bytes

_MAX_WEIGHTS = 0.95
"""Largest fraction of a card for weights; forward passes and the KV cache need more than the
rest."""


def planned_or_nearest(args: EngineArgs, device: str, num_cards: int) -> EnginePlan:
    """Return the plan of an engine; the error of a model that does not fit suggests a setting.

    See `make_engine_plan`.

    Raises:
        ConfigError: the engine cannot start. If its weights are too large, the error contains the
            fewest cards that hold them, and whether FP8 would be enough.
    """
    try:
        return make_engine_plan(args, device, num_cards)
    except ConfigError as error:
        found = excess(args, device, num_cards)
        if found is None:
            raise
        raise ConfigError(f"{found}. {_nearest(args, device, num_cards)}") from error


def excess(args: EngineArgs, device: str, num_cards: int) -> str | None:
    """Return how much memory the weights take, if that is why the engine cannot start; else None.

    Args:
        args: arguments; see `make_engine_plan`.
        device: device; see `make_engine_plan`.
        num_cards: number of cards; see `make_engine_plan`.
    """
    card_bytes = CARDS[device].pool_bytes
    try:
        config, num_bytes = weights_bytes(args, device, num_cards)
    except ConfigError:
        return None
    if num_bytes <= _MAX_WEIGHTS * card_bytes:
        return None
    on_each = f" on each of {num_cards} cards" if num_cards > 1 else ""
    name = (config.model.model or "the model").rstrip("/").rpartition("/")[2]
    return (
        f"{name} in {weight_format(config) or config.model.dtype_name} takes "
        f"{format_bytes(num_bytes)}{on_each}, a {device} card has {format_bytes(card_bytes)}"
    )


def _nearest(args: EngineArgs, device: str, num_cards: int) -> str:
    """Return advice for weights that do not fit: more cards, or FP8."""
    ways = []
    for more in (count for count in NUMBERS_OF_CARDS if count > num_cards):
        if _fits(args, device, more):
            ways.append(f"--num-cards {more}")
            break
    fp8 = _fp8_bytes(args, device, num_cards)
    if fp8 is not None and fp8 < _MAX_WEIGHTS * CARDS[device].pool_bytes:
        ways.append(f"an FP8 checkpoint ({format_bytes(fp8)})")
    if not ways:
        return f"It fits on no number of cards up to {NUMBERS_OF_CARDS[-1]}. Use a smaller model"
    return f"Use {', or '.join(ways)}"


def _fits(args: EngineArgs, device: str, num_cards: int) -> bool:
    try:
        _, num_bytes = weights_bytes(args, device, num_cards)
        if num_bytes > CARDS[device].pool_bytes:
            return False
        make_engine_plan(args, device, num_cards)
    except ConfigError:
        return False
    return True


def _fp8_bytes(args: EngineArgs, device: str, num_cards: int) -> int | None:
    """Return the bytes of the weights in FP8; None if they are quantized, or cannot be in FP8."""
    if args.quantization is not None:
        return None
    try:
        _, num_bytes = weights_bytes(args, device, num_cards, quantization="fp8")
    except ConfigError:
        return None
    return num_bytes
