"""Handle the differences between transformers 4, which Gaudi images have, and 5."""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any


@cache
def is_version_4() -> bool:
    """Return whether the installed transformers is a 4.x. Does not import it."""
    return version("transformers").startswith("4.")


def attention_can_mask() -> bool:
    """Return whether transformers' models leave masking to a custom attention function, as since
    4.53.
    """
    return find_spec("transformers.masking_utils") is not None


def dtype_argument(dtype: object) -> dict[str, object]:
    """Return the argument of `from_pretrained` and `from_config` for the dtype of the weights.

    The releases of version 4 in Gaudi images only know the older name.

    Args:
        dtype: a torch.dtype, or "auto".
    """
    return {"torch_dtype" if is_version_4() else "dtype": dtype}


def weight_conversions(model: Any) -> list[Any]:
    """Return transformers' conversions from names in checkpoints to names of its modules; empty for
    version 4, which uses the names of the checkpoints.
    """
    if find_spec("transformers.conversion_mapping") is None:
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def renamed_weight(name: str, conversions: list[Any]) -> tuple[str, str | None]:
    """Return the name of the parameter that a checkpoint tensor fills, and a pattern or None.

    The pattern of the tensor's name is given if transformers computes the parameter from several
    tensors, or several parameters from one.
    """
    if not conversions:
        return name, None
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    return rename_source_key(name, renamings, converters)
