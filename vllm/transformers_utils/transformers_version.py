"""What differs between transformers 4, which Gaudi images have, and 5."""

from functools import cache
from importlib.metadata import version


@cache
def is_version_4() -> bool:
    """Whether the installed transformers is a 4.x; does not import it."""
    return version("transformers").startswith("4.")


def dtype_argument(dtype: object) -> dict[str, object]:
    """The argument of `from_pretrained` and `from_config` for the type of the weights: a
    torch.dtype, or "auto". The releases of 4 that images have know the older name only."""
    return {"torch_dtype" if is_version_4() else "dtype": dtype}
