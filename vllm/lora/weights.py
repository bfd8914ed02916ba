"""Read the weights of a LoRA adapter as they are in its file.

Independent of models; `AdapterLayers` knows to which layers they belong.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from vllm.errors import RequestError
from vllm.model_executor.layers.slice import CheckpointTensor
from vllm.model_executor.loader.checkpoint import read_bin
from vllm.model_executor.loader.safetensors_file import open_safetensors
from vllm.utils.background_work import Pause
from vllm.utils.files.lfs import pointer_problem

_HEADER_BYTES, _HEADER_BYTES_OF_PART = 4 << 20, 2048
"""Longest header of a file, and so much more for each projection of the model. A file may have
layers of all stages and experts of all ranks."""
ROWS_COMPARED = 256
"""Rows of a weight that are compared at once."""


def check_header(path: Path, num_parts: int) -> None:
    """Refuse a header that is too long for the model before it is read, because reading it blocks
    everything else.

    Args:
        path: path of the file.
        num_parts: number of projections of the model.

    Raises:
        RequestError: it is too long.
    """
    if path.suffix != ".safetensors" or pointer_problem(path):
        return
    most = _HEADER_BYTES + _HEADER_BYTES_OF_PART * num_parts
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > most:
        raise RequestError(
            f"{path} is damaged, or an adapter of a different model: its header has {length} "
            f"bytes, but an adapter of this model needs at most {most}"
        )


@contextmanager
def open_weights(path: Path, pause: Pause) -> Iterator[dict[str, CheckpointTensor]]:
    """Yield the tensors of a file, by name. Each is read when it is used.

    Raises:
        RequestError: the file was not downloaded.
        WeightLoadError: the file is damaged.
    """
    if problem := pointer_problem(path):
        raise RequestError(problem)
    found: dict[str, CheckpointTensor] = {}
    if path.suffix != ".safetensors":
        yield dict(read_bin(path))
        return
    with open_safetensors(path, num_threads=1) as tensors:
        for name, source in tensors:
            pause()
            found[name] = source
        yield found


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity."""
    # One pass without temporaries: isfinite() takes twenty times as long.
    return all(math.isfinite(float(end)) for end in tensor.aminmax())


def is_close(given: CheckpointTensor, known: Callable[[int, int], Tensor], pause: Pause) -> bool:
    """Return whether a tensor has the values of a weight, except for rounding.

    Args:
        given: the tensor, [rows, elements].
        known: returns the rows of the weight from a first index up to an end.
        pause: called between two reads.
    """
    largest, differences = 0.0, [0.0]
    for start in range(0, given.shape[0], ROWS_COMPARED):
        pause()
        part = given.read((slice(start, start + ROWS_COMPARED),)).float()
        own = known(start, start + len(part)).float()
        largest = max(largest, float(own.abs().max()))
        differences.append(float((part - own).abs().max()))
    return all(difference <= 0.02 * largest for difference in differences)  # NaN compares as False


def source_of(tensor: Tensor) -> CheckpointTensor:
    """Return a source that reads from a tensor in memory."""
    return CheckpointTensor(tensor.shape, lambda index: tensor[index])
