"""Test packing the fields of a dataclass into one int32 buffer, and unpacking them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from vllm.attention.backends.packed_fields import PackedFields, packed, packed_fields_of


@dataclass(frozen=True)
class Inner:
    table: Any = packed("B C")
    scales: Any = packed("B", torch.float32)


@dataclass(frozen=True)
class Outer:
    ids: Any = packed("B")
    inner: Inner = packed_fields_of(Inner)
    last: Any = packed("C")


FIELDS = PackedFields(Outer)
SIZES = {"B": 2, "C": 3}


def given(**changes: Any) -> Outer:
    inner = Inner(np.arange(6, dtype=np.int32).reshape(2, 3), np.float32([0.5, -1e-9]))
    values = {"ids": np.int32([7, 8]), "inner": inner, "last": np.int32([4, 5, 6])}
    return Outer(**values | changes)


def test_what_is_packed_is_unpacked_with_its_shape_and_type():
    buffer = FIELDS.pack(given(), SIZES)
    assert buffer.dtype == np.int32
    assert FIELDS.part_sizes(SIZES) == (2, 6, 2, 3)
    assert buffer[:8].tolist() == [7, 8, 0, 1, 2, 3, 4, 5]
    got = FIELDS.unpack(torch.from_numpy(buffer), SIZES)
    assert got.inner.table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(got.inner.scales, torch.tensor([0.5, -1e-9]))
    assert (got.ids.tolist(), got.last.tolist()) == ([7, 8], [4, 5, 6])


def test_views_share_the_memory_of_the_buffer():
    buffer = torch.from_numpy(FIELDS.pack(given(), SIZES))
    buffer.zero_()
    assert not FIELDS.unpack(buffer, SIZES).inner.table.any()


def test_an_array_that_does_not_fit_its_field_is_named():
    with pytest.raises(ValueError, match=r"last must be int32 \[3\] \(C\) .*, got int32 \[2\]"):
        FIELDS.pack(given(last=np.int32([1, 2])), SIZES)
    with pytest.raises(ValueError, match=r"ids must be int32 \[2\] \(B\) .*, got int64 \[2\]"):
        FIELDS.pack(given(ids=np.int64([1, 2])), SIZES)
