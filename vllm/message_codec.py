"""Encodes messages with numpy arrays as msgpack, to send them to another process.

An array travels as (dtype, shape, bytes). It arrives read-only.
Independent of the messages themselves.
"""

from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

_Message = TypeVar("_Message")


def encode_array(value: Any) -> Any:
    """An array as what msgpack can hold; the `enc_hook` of an encoder.

    Raises:
        TypeError: the value is something else, which msgpack cannot hold either.
    """
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def decode_array(kind: Any, value: Any) -> Any:
    """The array that `encode_array` was given; the `dec_hook` of a decoder.

    Args:
        kind: what the message declares, an `npt.NDArray` of some dtype.
        value: dtype, shape and bytes.

    Raises:
        ValueError: the array has another dtype than the message declares.
        TypeError: the message declares something other than an array.
    """
    if get_origin(kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot be received")
    dtype, shape, data = value
    array = np.frombuffer(data, dtype).reshape(shape)
    (expected,) = get_args(get_args(kind)[1])
    if array.dtype != expected:
        raise ValueError(f"expected an array of {expected.__name__}, got {array.dtype}")
    return array


encode = msgspec.msgpack.Encoder(enc_hook=encode_array).encode
"""A message as bytes. Raises TypeError when it holds code."""


def decoder(kind: type[_Message]) -> msgspec.msgpack.Decoder[_Message]:
    """What turns bytes into a message of one type; to be made once and kept."""
    return msgspec.msgpack.Decoder(kind, dec_hook=decode_array)
