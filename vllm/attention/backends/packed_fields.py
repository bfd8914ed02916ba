"""Pack the fields of a dataclass into one int32 buffer, and unpack them.

The data of a padded batch are copied to the device at once. They are a dataclass, in which each
field declares its shape in padded sizes. The size and the order of the buffer, packing on the host,
and the views on the device are all derived from these declarations. The same class holds numpy
arrays on the host and tensors on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm.messages import IntArray

Array = TypeVar("Array")
"""`IntArray` on the host, `Tensor` on the device."""
Fields = TypeVar("Fields")
"""A dataclass of arrays."""

Sizes = Mapping[str, int]
"""Letter -> padded size."""

_SHAPE, _DTYPE, _NESTED = "packed shape", "packed dtype", "packed class"


def packed(letters: str, dtype: torch.dtype = torch.int32) -> Any:
    """Define a field with a shape such as "B Q".

    Args:
        letters: names of the padded sizes, separated by spaces.
        dtype: a dtype of 4 bytes; its bits are stored as int32.
    """
    return field(metadata={_SHAPE: tuple(letters.split()), _DTYPE: dtype})


def packed_fields_of(cls: type[Any]) -> Any:
    """Define a field whose value is a dataclass of packed fields."""
    return field(metadata={_NESTED: cls})


@dataclass(frozen=True)
class _Field:
    name: str
    letters: tuple[str, ...]
    dtype: torch.dtype
    host_dtype: "np.dtype[Any]"
    nested: "PackedFields[Any] | None"

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        if len(self.letters) == 1:  # a fast path for most fields: every step packs them on the host
            return (sizes[self.letters[0]],)
        return tuple(sizes[letter] for letter in self.letters)


class PackedFields(Generic[Fields]):
    """Layout of the fields of a dataclass in one buffer.

    Args:
        cls: dataclass whose fields are all defined by `packed` or `packed_fields_of`.
    """

    def __init__(self, cls: type[Fields]) -> None:
        self._cls = cls
        self._fields: list[_Field] = []
        for f in fields(cls):  # type: ignore[arg-type]
            dtype = f.metadata.get(_DTYPE, torch.int32)
            host_dtype = np.dtype(str(dtype).removeprefix("torch."))
            nested = PackedFields(f.metadata[_NESTED]) if _NESTED in f.metadata else None
            self._fields.append(
                _Field(f.name, f.metadata.get(_SHAPE, ()), dtype, host_dtype, nested)
            )

    def part_sizes(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the number of elements of each field, in the order of the buffer."""
        parts: tuple[int, ...] = ()
        for f in self._fields:
            own = (prod(f.shape(sizes)),) if f.nested is None else f.nested.part_sizes(sizes)
            parts = parts + own
        return parts

    def pack(self, given: Fields, sizes: Sizes) -> IntArray:
        """Pack arrays on the host into a buffer.

        Raises:
            ValueError: an array does not have the shape or the dtype of its field.
        """
        parts: list[IntArray] = []
        self._collect(given, sizes, parts)
        return np.concatenate(parts)

    def _collect(self, given: Fields, sizes: Sizes, parts: list[IntArray]) -> None:
        for f in self._fields:
            value = getattr(given, f.name)
            if f.nested is not None:
                f.nested._collect(value, sizes, parts)
                continue
            if value.shape != f.shape(sizes) or value.dtype != f.host_dtype:
                raise ValueError(
                    f"{f.name} must be {f.host_dtype} {list(f.shape(sizes))} "
                    f"({' '.join(f.letters)}) for this batch, got {value.dtype} "
                    f"{list(value.shape)}"
                )
            if f.dtype is not torch.int32:
                value = value.view(np.int32)
            parts.append(value if len(f.letters) == 1 else value.ravel())

    def unpack(self, buffer: Tensor, sizes: Sizes) -> Fields:
        """Return views of the parts of a buffer. A compiler can trace this."""
        parts = list(buffer.split(self.part_sizes(sizes)))
        return self._take(parts, sizes)

    def _take(self, parts: list[Tensor], sizes: Sizes) -> Fields:
        values: dict[str, Any] = {}
        for f in self._fields:
            if f.nested is not None:
                values[f.name] = f.nested._take(parts, sizes)
                continue
            part = parts.pop(0)
            if f.dtype is not torch.int32:
                part = part.view(f.dtype)
            values[f.name] = part if len(f.letters) == 1 else part.view(f.shape(sizes))
        return self._cls(**values)
