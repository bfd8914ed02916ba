"""Read the data type and the names of a checkpoint's weights from the headers of its files."""

import json
import re
import struct
from collections import Counter
from pathlib import Path

from vllm.errors import WeightLoadError
from vllm.transformers_utils.weight_files import find_files, find_index
from vllm.utils.files.json_file import read_json_object

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_HEAD = re.compile(r"(^|\.)lm_head\.")
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20
"""Maximum number of bytes of a header, as in the safetensors library."""


def dtype_of_files(folder: Path, load_format: str) -> str | None:
    """Return the data type of most weights.

    Args:
        folder: folder of the checkpoint.
        load_format: format of its files.

    Returns:
        Name of a torch dtype. None: the files have another format, do not exist, or are damaged,
            which is reported when they are loaded.
    """
    try:
        files = find_files(folder, load_format)
    except WeightLoadError:
        return None
    sizes: Counter[str] = Counter()
    for path in files:
        for _, dtype, num_bytes in _tensors_in(path):
            if dtype in _NAMES:
                sizes[dtype] += num_bytes
    return _NAMES[max(sizes, key=lambda dtype: sizes[dtype])] if sizes else None


def names_of_tensors(folder: Path, load_format: str) -> set[str]:
    """Return the names of the weights of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        load_format: format of its files.

    Returns:
        The names. Empty: the headers of the files have no names, or the files do not exist or are
            damaged.
    """
    index = find_index(folder, load_format)
    if index is not None:
        names = read_json_object(index).get("weight_map")
        return set(names) if isinstance(names, dict) else set()
    try:
        files = find_files(folder, load_format)
    except WeightLoadError:
        return set()
    return {name for path in files for name, _, _ in _tensors_in(path)}


def has_output_head(folder: Path, load_format: str) -> bool:
    """Return whether the files of a checkpoint have an output head, as far as their headers say.

    Args:
        folder: folder of the checkpoint.
        load_format: format of its files.
    """
    return any(_HEAD.search(name) for name in names_of_tensors(folder, load_format))


def _tensors_in(path: Path) -> list[tuple[str, str, int]]:
    """Return (name, data type, size in bytes) of each tensor in a file; empty if it is not a
    safetensors file.
    """
    if path.suffix != ".safetensors":
        return []
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > _MAX_HEADER_BYTES:
                return []
            entries = json.loads(file.read(length))
        return [
            (
                name,
                str(entry["dtype"]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error):
        return []
