"""Reads the tensors of a checkpoint folder one at a time, only as far as needed.

Supports safetensors (including Mistral AI's files), GGUF and PyTorch `.bin` files. Independent of
models. Cannot run code from a checkpoint: `.bin` files are unpickled with `weights_only=True`.
"""

import pickle
import zipfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from vllm.errors import WeightLoadError
from vllm.logger import init_logger
from vllm.model_executor.layers.slice import CheckpointTensor
from vllm.model_executor.loader.gguf_file import read_gguf
from vllm.model_executor.loader.mistral_file import in_the_order_of_transformers
from vllm.model_executor.loader.safetensors_file import read_safetensors
from vllm.transformers_utils.weight_headers import left_out_copies
from vllm.utils.files.weight_files import CONSOLIDATED

logger = init_logger(__name__)

_NESTED = ("state_dict", "model_state_dict", "module", "model")
"""Keys under which programs for training save the weights of a model."""


def iterate_tensors(
    files: list[Path], show_progress: bool, on_file: Callable[[int], None] | None = None
) -> Generator[tuple[str, CheckpointTensor], None, None]:
    """Yield the name and tensor of every tensor of the files.

    A tensor can be read only until the next one is yielded.

    Args:
        files: files from `find_files`.
        show_progress: show a progress bar.
        on_file: called before each file with the number of files that are done.

    Raises:
        WeightLoadError: a file is damaged or its content does not match its name.
    """
    if files and files[0].suffix == ".gguf":
        yield from _read_gguf(files, show_progress)
        return
    tensors = _read_files(files, show_progress, on_file)
    if files and files[0].match(CONSOLIDATED):
        tensors = in_the_order_of_transformers(files[0].parent, tensors)
    yield from tensors


def _read_files(
    files: list[Path], show_progress: bool, on_file: Callable[[int], None] | None
) -> Iterator[tuple[str, CheckpointTensor]]:
    left_out = left_out_copies(files)
    if left_out:
        logger.warning(
            "several files have the same tensors: %d copies, such as %s, are not read",
            len(left_out),
            min(name for name, _ in left_out),
        )
    bar = tqdm(files, desc="Loading checkpoint files", disable=not show_progress)
    for num_done, path in enumerate(bar):
        if on_file is not None:
            on_file(num_done)
        for name, tensor in (
            read_safetensors(path) if path.suffix == ".safetensors" else read_bin(path)
        ):
            if (name, path) not in left_out:
                yield name, tensor


def _read_gguf(files: list[Path], show_progress: bool) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the tensors of a GGUF model of one or more files; the first file has the metadata."""
    bar = tqdm(desc="Loading tensors of the GGUF file", disable=not show_progress)
    with bar:
        for entry in read_gguf(files):
            yield entry
            bar.update()


def read_bin(path: Path) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yield the name and tensor of every tensor of a file written by torch.save.

    Raises:
        WeightLoadError: the file is damaged, or contains other objects than tensors.
    """
    try:
        # Files written before torch 1.6 are not zip archives, so they cannot be mapped.
        can_map = zipfile.is_zipfile(path)
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except pickle.UnpicklingError as error:
        raise WeightLoadError(
            f"{path} is damaged, or contains objects other than tensors, which are not loaded for "
            f"security. Convert it to safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise WeightLoadError(
            f"{path} is damaged or not a PyTorch file: {_first_line(error)}"
        ) from error
    if isinstance(loaded, dict):
        inner = (loaded[key] for key in _NESTED if isinstance(loaded.get(key), dict))
        loaded = next(inner, loaded)
    if not isinstance(loaded, dict) or not all(map(_is_entry, loaded.items())):
        raise WeightLoadError(f"{path} is not a dict of names and dense tensors")
    for name, tensor in loaded.items():
        yield (
            name,
            CheckpointTensor(tensor.shape, tensor.__getitem__, dtype=tensor.dtype, path=path),
        )


def _is_entry(item: tuple[Any, Any]) -> bool:
    name, tensor = item
    is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.is_cpu
    return isinstance(name, str) and is_dense


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
