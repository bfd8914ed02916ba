"""One image, sound or video of a request as it was received, or its embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm.errors import RequestError
from vllm.multimodal.interface.family import EMBEDDINGS, EncoderInput, VideoFrames


def refuse(where: str, reason: str) -> RequestError:
    """Create the error about an item that is not accepted.

    Args:
        where: name of the item.
        reason: what is wrong, and what is accepted; without content of the item.
    """
    return RequestError(f"{where}: {reason}", param=where)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MediaSource:
    """An image, sound or video of a request, not decoded yet.

    It has exactly one of `data`, `pixels`, `samples`, `frames` and `encoded`.

    Attributes:
        modality: "image", "audio" or "video".
        where: name of the item in error messages, such as "messages[2].content[1]".
        data: content of the file.
        pixels: [H, W, 3] in RGB, of an image that a program has decoded.
        samples: [n] from -1 to 1, one channel, of a sound that a program has decoded.
        sampling_rate: `samples` per second.
        frames: frames of a video that a program has decoded.
        encoded: given embeddings, which need no encoder.
        uuid: id that the client has given it.
        detail: resolution that the client asks for: "low", "high", "auto" or "original".
        overrides: settings of the image processor for this request.
    """

    modality: str
    where: str
    data: bytes | None = field(default=None, repr=False)
    pixels: NDArray[np.uint8] | None = field(default=None, repr=False)
    samples: NDArray[np.float32] | None = field(default=None, repr=False)
    sampling_rate: int | None = None
    frames: VideoFrames | None = field(default=None, repr=False)
    encoded: EncoderInput | None = field(default=None, repr=False)
    uuid: str | None = None
    detail: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        contents = (self.data, self.pixels, self.samples, self.frames, self.encoded)
        assert sum(each is not None for each in contents) == 1, "one content"
        assert (self.samples is None) == (self.sampling_rate is None), "a rate of samples"

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The content as arrays by name; a file is an array of bytes.

        `with_arrays` is the reverse, except for embeddings, which are not sent to other processes.
        """
        if self.data is not None:
            return {"data": np.frombuffer(self.data, np.uint8)}
        if self.pixels is not None:
            return {"pixels": self.pixels}
        if self.samples is not None:
            return {"samples": self.samples}
        if self.encoded is not None:
            return {EMBEDDINGS: self.encoded.tensors[EMBEDDINGS]}
        assert self.frames is not None
        return {"frames": self.frames.pixels, "seconds": self.frames.seconds}

    @classmethod
    def with_arrays(cls, arrays: Mapping[str, NDArray[Any]], **fields: Any) -> "MediaSource":
        """Make a source from the result of its property `arrays`.

        Args:
            arrays: content by name.
            fields: the other attributes.
        """
        if "data" in arrays:
            return cls(data=arrays["data"].tobytes(), **fields)
        if "frames" in arrays:
            return cls(frames=VideoFrames(arrays["frames"], arrays["seconds"]), **fields)
        return cls(pixels=arrays.get("pixels"), samples=arrays.get("samples"), **fields)
