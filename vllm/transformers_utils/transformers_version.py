"""What differs between transformers 4, which Gaudi images have, and 5."""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec


@cache
def is_version_4() -> bool:
    """Whether the installed transformers is a 4.x; does not import it."""
    return version("transformers").startswith("4.")


def lets_attention_mask() -> bool:
    """Whether its models leave masks to the attention that is put in, as since 4.53."""
    return find_spec("transformers.masking_utils") is not None


def dtype_argument(dtype: object) -> dict[str, object]:
    """The argument of `from_pretrained` and `from_config` for the type of the weights: a
    torch.dtype, or "auto". The releases of 4 that images have know the older name only."""
    return {"torch_dtype" if is_version_4() else "dtype": dtype}
