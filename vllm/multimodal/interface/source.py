"""One image, sound or video of a request, as it was received."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm.errors import RequestError


def refuse(where: str, reason: str) -> RequestError:
    """Return the error of an item that is not accepted.

    Args:
        where: name of the item.
        reason: what is wrong, and what is accepted; without content of the item.
    """
    return RequestError(f"{where}: {reason}", param=where)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MediaSource:
    """An image, sound or video of a request, not decoded yet. Has either `data` or `pixels`.

    Attributes:
        modality: "image", "audio" or "video".
        where: its name in error messages, such as "messages[2].content[1]".
        data: content of the file.
        pixels: [H, W, 3] in RGB, of an image that a program has decoded.
        uuid: name that the client has given it.
        detail: resolution that the client asks for: "low", "high", "auto" or "original".
        overrides: settings of the image processor for this request.
    """

    modality: str
    where: str
    data: bytes | None = field(default=None, repr=False)
    pixels: NDArray[np.uint8] | None = field(default=None, repr=False)
    uuid: str | None = None
    detail: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.data is None) != (self.pixels is None), "one of data and pixels"
