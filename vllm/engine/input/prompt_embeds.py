"""Prompts that are embeddings: checks them and converts them to `TokenEmbeddings`.

Accepts tensors of torch, arrays of numpy, and base64 of a file with one tensor. Does not import
torch: a tensor has its own methods.
"""

import base64
import binascii
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.config import ModelConfig
from vllm.errors import PromptTooLongError, RequestError
from vllm.messages import CacheKey, TokenEmbeddings
from vllm.utils.files.tensor_file import RawTensor, TensorFileError, read_tensor_file

PLACEHOLDER_TOKEN_ID = 0
"""Stands for each token of such a prompt wherever tokens are counted; no model ever reads it."""

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
"""Finite number of each dtype of a model."""
_CHUNK_ELEMENTS = 2**20
"""How many numbers are checked at a time."""


class PromptEmbeds:
    """Reads the embeddings that prompts of one model are given as.

    Args:
        model: complete.
        max_model_len: prompt and output tokens at most.
    """

    def __init__(self, model: ModelConfig, max_model_len: int) -> None:
        self._is_enabled = model.enable_prompt_embeds
        self._size = model.resolved_arch.embedding_size
        self._max_model_len = max_model_len
        self._largest = _LARGEST[model.dtype_name]

    def read(self, value: Any) -> TokenEmbeddings:
        """One embedding per token of a prompt.

        Args:
            value: a tensor of torch or an array of numpy [T, embedding size]; base64 of a
                `torch.save` or safetensors file with such a tensor; or a result of this method.

        Raises:
            RequestError: the engine takes no embeddings, or `value` is something else.
        """
        if isinstance(value, TokenEmbeddings):
            return value
        if not self._is_enabled:
            raise _refused(
                "this engine takes no embeddings as prompts; start it with --enable-prompt-embeds"
            )
        self._check_length(value)
        tensor = _decode(value) if isinstance(value, (str, bytes)) else _copy(value)
        shape = tensor.shape
        if len(shape) == 3 and shape[0] == 1:
            shape = shape[1:]  # as in transformers, with a batch dimension of 1
        if len(shape) != 2 or shape[1] != self._size or not shape[0]:
            raise _refused(
                f"the tensor has shape {list(tensor.shape)}, and must have [tokens, {self._size}]: "
                "one embedding of this model per token"
            )
        if shape[0] >= self._max_model_len:
            raise PromptTooLongError(shape[0], self._max_model_len)
        self._check_numbers(tensor)
        return TokenEmbeddings(start=0, shape=shape, dtype=tensor.dtype, data=tensor.data)

    def _check_length(self, value: Any) -> None:
        """Check the length before the value is decoded or copied."""
        longest = self._max_model_len * self._size * 8
        if isinstance(value, (str, bytes)) and len(value) > 2 * longest + 2**16:
            raise _refused(
                f"{len(value)} characters are more than a prompt of {self._max_model_len} tokens "
                "(max_model_len) can have"
            )
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) > 1 and shape[-2] >= self._max_model_len:
            raise PromptTooLongError(int(shape[-2]), self._max_model_len)

    def _check_numbers(self, tensor: RawTensor) -> None:
        """Refuse values that are not finite: they would stay in the KV cache."""
        width = {"float64": 8, "float32": 4}.get(tensor.dtype, 2) * _CHUNK_ELEMENTS
        for start in range(0, len(tensor.data), width):
            numbers = _as_floats(tensor.dtype, tensor.data[start : start + width])
            if not (np.abs(numbers) <= self._largest).all():
                raise _refused(
                    "the tensor has a value that is NaN, infinite, or too large for the dtype of "
                    "the model"
                )


def cache_keys(embeddings: Iterable[TokenEmbeddings]) -> tuple[CacheKey, ...]:
    """Keys of the prefix cache for these embeddings, by the position where each begins."""
    return tuple(CacheKey(part.start, _hash_of(part)) for part in embeddings)


def _hash_of(embeddings: TokenEmbeddings) -> str:
    digest = sha256(repr((embeddings.shape, embeddings.dtype)).encode())
    digest.update(embeddings.data)
    return "embeddings:" + digest.hexdigest()


def _decode(value: str | bytes) -> RawTensor:
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"is not base64: {error}") from None
    try:
        return read_tensor_file(data)
    except TensorFileError as error:
        raise _refused(f"the decoded file {error}") from None


def _copy(value: Any) -> RawTensor:
    """Copy a tensor of torch, on any device, or an array."""
    if isinstance(value, np.ndarray):
        found, dtype = value, str(value.dtype)
    elif type(value).__module__.partition(".")[0] == "torch":
        dtype = str(value.dtype).removeprefix("torch.")
        if str(value.layout) != "torch.strided" or value.is_quantized:
            raise _refused(f"must be a dense tensor, got {value.layout}")
        if value.device.type == "meta":
            raise _refused("the tensor is on the device 'meta', so it has no values")
    else:
        raise _refused(f"must be a tensor or an array, got {type(value).__name__}")
    if dtype not in _DTYPES:
        raise _refused(f"the tensor has dtype {dtype}; accepted: {', '.join(_DTYPES)}")
    if not isinstance(value, np.ndarray):
        dense = value.detach().to("cpu")
        found = _bits(dense.float().numpy()) if dtype == "bfloat16" else dense.numpy()
    shape = tuple(int(size) for size in value.shape)
    return RawTensor(dtype, shape, np.ascontiguousarray(found).tobytes())


def _bits(bfloats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of numbers that are exact in bfloat16, a type that numpy lacks."""
    return (np.ascontiguousarray(bfloats).view(np.uint32) >> 16).astype(np.uint16)


def _as_floats(dtype: str, data: bytes) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = np.frombuffer(data, dtype)
    return numbers.astype(np.float32) if dtype == "float16" else numbers


def needs_tokens(name: str) -> RequestError:
    """The error of a field that needs the tokens of the prompt, which embeddings do not have."""
    return RequestError(
        f"{name} needs the tokens of the prompt, and prompt_embeds has none. Leave {name} out",
        param=name,
    )


def _refused(problem: str) -> RequestError:
    return RequestError(f"prompt_embeds: {problem}", param="prompt_embeds")
