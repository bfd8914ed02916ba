"""The tensors of a checkpoint folder, one at a time, read from disk only as far as needed.

Reads safetensors and PyTorch `.bin` files. Knows no model. Nothing here can run code from a
checkpoint: `.bin` files are unpickled with `weights_only=True`.
"""

import json
import pickle
import zipfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import Source
from vllm.model_executor.loader.safetensors_file import read_safetensors

_INDEX_NAMES = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json", "model*.safetensors"),
    "pt": ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin"),
}
"""Form -> single file, index of a sharded checkpoint, shards without an index."""


def find_files(folder: Path, load_format: str) -> list[Path]:
    """The files that hold the weights.

    Args:
        folder: the model's folder.
        load_format: "safetensors", "pt", or "auto" for the first of the two that is there.

    Raises:
        WeightLoadError: there are none, or the index names a file that is not there.
    """
    forms = ("safetensors", "pt") if load_format == "auto" else (load_format,)
    for form in forms:
        single, index, pattern = _INDEX_NAMES[form]
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _read_index(folder / index)
        if shards := sorted(folder.glob(pattern)):
            return shards
    wanted = " or ".join(name for form in forms for name in _INDEX_NAMES[form][:2])
    raise WeightLoadError(f"no weights in {folder}: expected {wanted}")


def _read_index(path: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightLoadError(f"{path} is not a readable index: {error!r}") from error
    files = [path.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightLoadError(
            f"{len(missing)} of {len(files)} files named by {path} are missing: "
            f"{name_some(missing)}"
        )
    return files


def iterate_tensors(
    files: list[Path], show_progress: bool
) -> Generator[tuple[str, Source], None, None]:
    """Every tensor of the files with its name. A `Source` is valid until the next one.

    Raises:
        WeightLoadError: a file is damaged or is not what its name says.
    """
    for path in tqdm(files, desc="Loading checkpoint files", disable=not show_progress):
        yield from read_safetensors(path) if path.suffix == ".safetensors" else _read_bin(path)


def _read_bin(path: Path) -> Iterator[tuple[str, Source]]:
    try:
        # Files from before torch 1.6 are no zip archives and cannot be mapped.
        can_map = zipfile.is_zipfile(path)
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except pickle.UnpicklingError as error:
        raise WeightLoadError(
            f"{path} is damaged or holds more than tensors, which is never loaded; "
            f"convert it to safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise WeightLoadError(
            f"{path} is damaged or not a PyTorch file: {_first_line(error)}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise WeightLoadError(f"{path} is not a dict of tensors")
    for name, tensor in loaded.items():
        yield name, Source(tensor.shape, tensor.__getitem__)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def name_some(names: list[str], most: int = 10) -> str:
    """The names in one line; after `most` of them only how many more.

    >>> name_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
