"""Convert tensors from a client or a program: torch tensors, numpy arrays, and base64 of a file
with one tensor.

Does not import torch, and calls only methods of the given tensor.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.utils.files.tensor_file import FLOATS, RawTensor, TensorFileError, read_tensor_file
from vllm.utils.text.base64_text import Base64Error, decode_base64

_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
"""Finite number of each dtype of a model."""
_CHUNK_ELEMENTS = 2**20
"""Values that are checked at a time."""


def dense_tensor(value: Any, dtypes: Sequence[str] = FLOATS) -> RawTensor:
    """Return a copy of a tensor.

    Args:
        value: a torch tensor on any device, an array, or base64 of a `torch.save` or safetensors
            file with one tensor.
        dtypes: accepted dtypes.

    Raises:
        TensorFileError: it is something else. The caller puts the name of the field before the
            message.
    """
    if isinstance(value, (str, bytes)):
        return _decode(value, dtypes)
    return _copy(value, dtypes)


def check_finite(tensor: RawTensor, dtype: str) -> None:
    """Refuse values that are not finite in the dtype of the model, because the KV cache would keep
    them.

    Args:
        tensor: floating-point tensor.
        dtype: dtype of the model.

    Raises:
        TensorFileError: a value is NaN, infinite, or too large.
    """
    num_bytes = 2 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype).itemsize
    width = num_bytes * _CHUNK_ELEMENTS
    for start in range(0, len(tensor.data), width):
        numbers = _as_floats(tensor.dtype, tensor.data[start : start + width])
        if not (np.abs(numbers) <= _LARGEST[dtype]).all():
            raise TensorFileError(
                "the tensor has a value that is NaN, infinite, or too large for the dtype of "
                "the model"
            )


def as_array(tensor: RawTensor) -> npt.NDArray[Any]:
    """Return a tensor as a numpy array. bfloat16, which numpy lacks, becomes float32."""
    if tensor.dtype == "bfloat16":
        return _as_floats(tensor.dtype, tensor.data).reshape(tensor.shape)
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def _decode(value: str | bytes, dtypes: Sequence[str]) -> RawTensor:
    try:
        data = decode_base64(value if isinstance(value, str) else value.decode("latin-1"))
    except Base64Error as error:
        raise TensorFileError(f"is not base64: it {error}") from None
    try:
        return read_tensor_file(data, dtypes)
    except TensorFileError as error:
        raise TensorFileError(f"the file {error}") from None


def _copy(value: Any, dtypes: Sequence[str]) -> RawTensor:
    if isinstance(value, np.ndarray):
        found, dtype = value, str(value.dtype)
    elif type(value).__module__.partition(".")[0] == "torch":
        dtype = str(value.dtype).removeprefix("torch.")
        if str(value.layout) != "torch.strided" or value.is_quantized:
            raise TensorFileError(f"must be a dense tensor, got {value.layout}")
        if value.device.type == "meta":
            raise TensorFileError("the tensor is on the device 'meta', so it has no values")
    else:
        raise TensorFileError(f"must be a tensor or an array, got {type(value).__name__}")
    if dtype not in dtypes:
        raise TensorFileError(f"the tensor has dtype {dtype}; accepted: {', '.join(dtypes)}")
    if not isinstance(value, np.ndarray):
        dense = value.detach().to("cpu")
        found = _bits(dense.float().numpy()) if dtype == "bfloat16" else dense.numpy()
    shape = tuple(int(size) for size in value.shape)
    return RawTensor(dtype, shape, np.ascontiguousarray(found).tobytes())


def _bits(bfloats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bfloat16 bits of float32 values that bfloat16 can represent exactly."""
    return (np.ascontiguousarray(bfloats).view(np.uint32) >> 16).astype(np.uint16)


def _as_floats(dtype: str, data: bytes) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = np.frombuffer(data, dtype)
    return numbers.astype(np.float32) if dtype == "float16" else numbers
