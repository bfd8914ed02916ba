"""Read the data type and the names of a checkpoint's weights from the headers of its files."""

import json
import re
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vllm.errors import WeightLoadError
from vllm.utils.files.json_file import read_json_object
from vllm.utils.files.weight_files import find_files, find_index

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_HEAD = re.compile(r"(^|\.)lm_head\.(?!bias$)\w+$")
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings?)\.weight$"
)
_CHUNK_BYTES = 16 << 20
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
        for entry in _tensors_in(path):
            if entry.dtype in _NAMES:
                sizes[entry.dtype] += entry.num_bytes
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
    return {entry.name for path in files for entry in _tensors_in(path)}


def has_own_head(folder: Path, load_format: str) -> bool:
    """Return whether the output head of a checkpoint has other values than its token embeddings.

    Then they are not tied, whatever config.json says: a program that trains adapters may have saved
    both, and a config may have the value of another model. A copy of the embeddings is no head of
    its own.

    Args:
        folder: folder of the checkpoint.
        load_format: format of its files.
    """
    if not any(map(_HEAD.search, names_of_tensors(folder, load_format))):
        return False
    try:
        files = find_files(folder, load_format)
    except WeightLoadError:
        return False
    entries = [entry for path in files for entry in _tensors_in(path)]
    found = [entry for entry in entries if _HEAD.search(entry.name)]
    outer = min((entry.name.rpartition("lm_head.")[0] for entry in found), key=len, default="")
    heads = [entry for entry in found if entry.name.startswith(f"{outer}lm_head.")]
    tables = [entry for entry in entries if _EMBEDDING.search(entry.name)]
    if len(heads) > 1:  # a quantized one, with its scales
        return True
    return bool(heads and tables) and not any(_is_copy(heads[0], table) for table in tables)


def left_out_copies(files: Sequence[Path]) -> set[tuple[str, Path]]:
    """Return (name, file) of tensors that are not read, because another file has them too.

    The index of a checkpoint says which file has a tensor. A file of an earlier upload may have it
    as well. Without an index, only exact copies are left out.

    Args:
        files: safetensors files of one checkpoint.
    """
    found: dict[str, list[_Entry]] = {}
    for path in files if len(files) > 1 else ():
        for entry in _tensors_in(path):
            found.setdefault(entry.name, []).append(entry)
    several = {name: entries for name, entries in found.items() if len(entries) > 1}
    if not several:
        return set()
    index = find_index(files[0].parent, "safetensors")
    listed = read_json_object(index).get("weight_map") if index is not None else None
    file_of = listed if isinstance(listed, dict) else {}
    left_out: set[tuple[str, Path]] = set()
    for name, entries in several.items():
        chosen = next((each for each in entries if each.path.name == file_of.get(name)), None)
        others = [each for each in entries if each is not (chosen or entries[0])]
        left_out |= {(name, each.path) for each in others if chosen or _is_copy(entries[0], each)}
    return left_out


def _is_copy(one: "_Entry", other: "_Entry") -> bool:
    """Return whether two tensors in files have the same bytes."""
    if (one.dtype, one.num_bytes) != (other.dtype, other.num_bytes):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.num_bytes
        while left > 0:
            count = min(left, _CHUNK_BYTES)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True


class _Entry(NamedTuple):
    """One tensor in a safetensors file."""

    name: str
    dtype: str
    num_bytes: int
    path: Path
    start: int
    """Position of its first byte in the file."""


def _tensors_in(path: Path) -> list[_Entry]:
    """Return the tensors in a file; empty if it is not a safetensors file."""
    if path.suffix != ".safetensors":
        return []
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > _MAX_HEADER_BYTES:
                return []
            entries = json.loads(file.read(length))
        return [
            _Entry(
                name,
                str(entry["dtype"]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
                path,
                _LENGTH.size + length + int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error):
        return []
