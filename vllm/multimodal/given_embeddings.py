"""Embeddings of images that a request contains instead of images."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from vllm.errors import RequestError
from vllm.messages import FloatArray
from vllm.multimodal.given import NamedItem
from vllm.multimodal.interface.checks import is_whole
from vllm.multimodal.interface.family import EMBEDDINGS, EncoderInput, MediaFamily
from vllm.multimodal.interface.source import MediaSource
from vllm.utils.files.dense_tensor import as_array, check_finite, dense_tensor
from vllm.utils.files.tensor_file import INTEGERS, TensorFileError

IMAGE_EMBEDS = "image_embeds"
_GRID = "image_grid_thw"
_GRID_INTEGERS = 3
_LARGEST = 2**31 - 1
"""Integer of a grid in a list, and the negative of the smallest one."""


class GivenEmbeddings:
    """Reads given embeddings of images for one model.

    Args:
        family: family of the model.
        size: size of the embedding of a token.
        dtype: data type of the model.
        is_enabled: the engine accepts them (`enable_mm_embeds`).
    """

    def __init__(self, family: MediaFamily, size: int, dtype: str, *, is_enabled: bool) -> None:
        self._family, self._size, self._dtype = family, size, dtype
        self._is_enabled = is_enabled

    def divide(self, given: Sequence[Any]) -> list[Any]:
        """Convert the embeddings among the images of a prompt to `EncoderInput`, one per image.

        Other items are returned unchanged.

        Args:
            given: images; dictionaries with `image_embeds`, which may be of several images; and
                tensors [n, width] or [images, n, width], if embeddings are enabled.

        Raises:
            RequestError: embeddings are not enabled, or these do not fit the model.
        """
        found: list[Any] = []
        for index, item in enumerate(given):
            where, value = f"multi_modal_data['image'][{index}]", item
            if isinstance(item, NamedItem):
                where, value = item.where, item.item
            if self._is_tensor(value):
                value = {IMAGE_EMBEDS: value}
            if not isinstance(value, Mapping):
                found.append(item)
                continue
            try:
                found += [NamedItem(where, each) for each in self._read(value)]
            except (RequestError, TensorFileError) as error:
                raise RequestError(f"{where}: {error}", param="prompt") from error
        return found

    @property
    def _width(self) -> int:
        return self._size * (1 + self._family.num_added)

    def _is_tensor(self, item: Any) -> bool:
        """Return whether an object is embeddings, and not pixels."""
        shape: tuple[int, ...] = tuple(getattr(item, "shape", ()))
        if not self._is_enabled or isinstance(item, MediaSource) or len(shape) not in (2, 3):
            return False
        # Distinguishes embeddings from pixels [3, H, W], which are often bytes.
        is_float = "float" in str(getattr(item, "dtype", ""))
        return is_float and bool(shape[-1] == self._width)

    def _read(self, given: Mapping[Any, Any]) -> Iterator[EncoderInput]:
        if set(given) - {IMAGE_EMBEDS, _GRID} or given.get(IMAGE_EMBEDS) is None:
            raise RequestError(
                f"an image as a dict must have the key {IMAGE_EMBEDS!r}, and may have {_GRID!r}, "
                f"got {', '.join(map(repr, given)) or 'none':.200}"
            )
        if not self._is_enabled:
            raise RequestError(
                "this engine takes no embeddings of images; start it with --enable-mm-embeds"
            )
        value, grids = given[IMAGE_EMBEDS], _read_grids(given.get(_GRID))
        several = value if isinstance(value, (list, tuple)) else [value]
        images = [image for each in several for image in self._read_tensor(each)]
        if grids is not None and len(images) == 1 and len(grids) > 1:
            images = _cut(images[0], [self._family.num_embeddings_of(grid) for grid in grids])
        if grids is not None and len(images) != len(grids):
            raise RequestError(
                f"{_GRID} must have three integers for each of {len(images)} images, got "
                f"{len(grids)} times three"
            )
        for index, embeddings in enumerate(images):
            grid = self._family.grid_of_embeddings(
                len(embeddings), None if grids is None else grids[index]
            )
            yield EncoderInput({EMBEDDINGS: embeddings}, grid)

    def _read_tensor(self, value: Any) -> list[FloatArray]:
        """Return the embeddings [n, width] of each image in a tensor."""
        try:
            tensor = dense_tensor(value)
            check_finite(tensor, self._dtype)
        except TensorFileError as error:
            raise RequestError(f"{IMAGE_EMBEDS}: {error}") from error
        shape, width = tensor.shape, self._width
        if len(shape) not in (2, 3) or shape[-1] != width or 0 in shape:
            raise RequestError(
                f"{IMAGE_EMBEDS}: the tensor must have the shape [embeddings, {width}] or "
                f"[images, embeddings, {width}], got {list(shape)}"
            )
        array = np.asarray(as_array(tensor), np.float32)
        return [array] if array.ndim == 2 else list(array)


def _read_grids(given: Any) -> list[tuple[int, ...]] | None:
    """Return the grid of each image; None if the request has none.

    Args:
        given: a tensor [3] or [images, 3], three integers, or a list of these.

    Raises:
        RequestError: they are not integers.
    """
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or _is_grid(given):
        return _grids_of(given)
    if not given:
        raise RequestError(f"{_GRID} must have three integers for each image, got none")
    return [grid for each in given for grid in _grids_of(each)]


def _grids_of(value: Any) -> list[tuple[int, ...]]:
    if _is_grid(value):
        return [tuple(value)]
    # numpy would reserve the size of the longest string for each entry of a list.
    if isinstance(value, (list, tuple, int, float)):
        if isinstance(value, (list, tuple)):
            got = f"a list of {len(value)} entries"
        else:
            got = type(value).__name__
        raise RequestError(f"{_GRID} must have three integers for each image, got {got}")
    try:
        tensor = dense_tensor(value, INTEGERS)
    except TensorFileError as error:
        raise RequestError(f"{_GRID}: {error}") from error
    shape = tensor.shape
    if len(shape) not in (1, 2) or shape[-1] != _GRID_INTEGERS or 0 in shape:
        raise RequestError(f"{_GRID} must have the shape [3] or [images, 3], got {list(shape)}")
    return [tuple(grid) for grid in as_array(tensor).reshape(-1, _GRID_INTEGERS).tolist()]


def _is_grid(value: Any) -> TypeGuard[Sequence[int]]:
    """Return whether a value is a list of three integers."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == _GRID_INTEGERS
        and all(is_whole(each, _LARGEST, -_LARGEST) for each in value)
    )


def _cut(embeddings: FloatArray, counts: Sequence[int]) -> list[FloatArray]:
    """Split concatenated embeddings by image.

    Raises:
        RequestError: their number differs from the sum over all images.
    """
    if min(counts) < 1 or sum(counts) != len(embeddings):
        raise RequestError(
            f"the {len(counts)} images of this {_GRID} must have {sum(counts)} embeddings, each at "
            f"least one, got {len(embeddings)}"
        )
    return np.split(embeddings, np.cumsum(counts)[:-1])
