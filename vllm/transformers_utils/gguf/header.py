"""Read the header of a GGUF file: its metadata, and the locations of its tensors.

Every length and count in the file is compared with the rest of the file before memory of that size
is allocated, so a manipulated file is refused at once. Weights are not read here.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm.errors import WeightLoadError
from vllm.utils.files.lfs import pointer_problem

SUFFIX = ".gguf"
_MAGIC = b"GGUF"


class BlockType(NamedTuple):
    """Storage format of a tensor in a GGUF file."""

    name: str
    block_size: int
    """Numbers of a row that are stored together."""
    block_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
"""Number in a file -> type, for the types that can be read."""

_OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of types that are not supported, for errors."""

_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_ITEMS = 1 << 21
"""Maximum number of items of a list in the metadata, and of characters of a text: more than any
vocabulary has."""

_ARRAY, _STRING, _BOOL = 9, 8, 7
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Type of a metadata value -> its dtype."""


@dataclass(frozen=True)
class StoredTensor:
    """Location and type of a tensor in a file."""

    path: Path
    start: int
    """First byte in the file."""
    type: BlockType
    shape: tuple[int, ...]
    """Shape as in torch: the last dimension has neighbouring elements."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a matrix row, which consists of whole blocks."""
        return self.shape[-1] // self.type.block_size * self.type.block_bytes


@dataclass(frozen=True)
class Header:
    """The content of a GGUF file, without its weights."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Read the header of one file.

    Raises:
        WeightLoadError: the file is damaged, is not a GGUF file, or has tensors of an unsupported
            type.
    """
    if problem := pointer_problem(path):
        raise WeightLoadError(problem)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise _damaged(path, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).read()
    except OSError as error:
        raise WeightLoadError(f"cannot read {path}: {error.strerror}") from error


def _damaged(path: Path, reason: str) -> WeightLoadError:
    return WeightLoadError(f"{path} is damaged or not a GGUF file: {reason}. Download it again")


def is_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file by its name or its first bytes. Ollama stores GGUF files
    under names that are hashes.
    """
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == SUFFIX or file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return path.suffix == SUFFIX


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.position = 0

    def read(self) -> Header:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise _damaged(self.path, "it does not begin with GGUF")
        (version,) = self._numbers("<I")
        if version not in (2, 3):
            raise WeightLoadError(
                f"{self.path} has version {version} of GGUF; supported: 2 and 3, little endian. "
                f"Convert the model again with a newer tool"
            )
        num_tensors, num_values = self._numbers("<QQ")
        self._check_count(num_tensors, 24, "tensors")
        self._check_count(num_values, 13, "metadata values")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            name = self._string()
            (kind,) = self._numbers("<I")
            if name in metadata:
                raise _damaged(self.path, f"it has the metadata {name!r} twice")
            metadata[name] = self._value(name, kind)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise _damaged(
                self.path,
                f"general.alignment must be from 1 to {_MAX_ALIGNMENT}, got {alignment!r}",
            )
        first = -(-self.position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, offset, block_type, shape in entries:
            if name in tensors:
                raise _damaged(self.path, f"it has the tensor {name} twice")
            tensor = StoredTensor(self.path, first + offset, block_type, shape)
            num_rows = 1
            for length in shape[:-1]:
                num_rows *= length
            end = tensor.start + num_rows * tensor.row_bytes
            if offset % alignment or end > self.size:
                raise _damaged(
                    self.path,
                    f"tensor {name} is at the bytes {tensor.start} to {end}, but the file has "
                    f"only {self.size} bytes",
                )
            tensors[name] = tensor
        return Header(metadata, tensors)

    def _tensor_entry(self) -> tuple[str, int, BlockType, tuple[int, ...]]:
        name = self._string()
        (num_dims,) = self._numbers("<I")
        if not 0 < num_dims <= _MAX_DIMS:
            raise _damaged(
                self.path, f"tensor {name} must have 1 to {_MAX_DIMS} dimensions, got {num_dims}"
            )
        shape = tuple(reversed(self._numbers(f"<{num_dims}Q")))
        kind, offset = self._numbers("<IQ")
        block_type = BLOCK_TYPES.get(kind)
        if block_type is None:
            accepted = ", ".join(each.name for each in BLOCK_TYPES.values())
            raise WeightLoadError(
                f"tensor {name} of {self.path} has the type {_OTHER_TYPES.get(kind, kind)}, which "
                f"is not supported; supported: {accepted}. Use a file with these types"
            )
        if 0 in shape or shape[-1] % block_type.block_size:
            raise _damaged(
                self.path,
                f"the last dimension of tensor {name} must be a multiple of "
                f"{block_type.block_size} ({block_type.name}), and none may be 0, got "
                f"{list(shape)}",
            )
        return name, offset, block_type, shape

    def _value(self, name: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._array(kind, 1)[0]
        if kind != _ARRAY:
            raise _damaged(self.path, f"the metadata {name!r} has the unknown type {kind}")
        kind, count = self._numbers("<IQ")
        if kind == _STRING:
            self._check_count(count, 8, f"strings in {name!r}")
            return [self._string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise _damaged(
                self.path, f"the metadata {name!r} is an array of the unknown type {kind}"
            )
        return self._array(kind, count)

    def _array(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        self._check_count(count, dtype.itemsize, "numbers")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _string(self) -> str:
        (length,) = self._numbers("<Q")
        self._check_count(length, 1, "characters")
        return self._take(length).decode("utf-8", "replace")

    def _numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _check_count(self, count: int, item_bytes: int, what: str) -> None:
        left = self.size - self.position
        if count * item_bytes > left:
            raise _damaged(
                self.path,
                f"it announces {count} {what} at byte {self.position}, but only {left} bytes are "
                "left",
            )
        if count > _MAX_ITEMS:
            raise _damaged(
                self.path,
                f"it announces {count} {what} at byte {self.position}, but at most {_MAX_ITEMS} "
                "are accepted",
            )

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise _damaged(self.path, f"it ends at byte {self.size}, inside its header")
        taken = self.data[self.position : end]
        self.position = end
        return taken
