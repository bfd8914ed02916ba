"""Read prompts that are given as embeddings: check them and convert them to `TokenEmbeddings`.

Accepts torch tensors, numpy arrays, and base64 of a file with one tensor. Does not import torch,
and calls only methods of the given tensor.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from vllm.config import ModelConfig
from vllm.errors import PromptTooLongError, RequestError
from vllm.messages import CacheKey, TokenEmbeddings
from vllm.utils.files.dense_tensor import check_finite, dense_tensor
from vllm.utils.files.tensor_file import TensorFileError

PLACEHOLDER_TOKEN_ID = 0
"""Stands for each token of such a prompt wherever tokens are counted; no model ever reads it."""


class PromptEmbeds:
    """Reads embeddings that are given as prompts, for one model.

    Args:
        model: complete config of the model.
        max_model_len: maximum number of prompt and output tokens.
    """

    def __init__(self, model: ModelConfig, max_model_len: int) -> None:
        self._is_enabled = model.enable_prompt_embeds
        self._size = model.resolved_arch.embedding_size
        self._max_model_len = max_model_len
        self._dtype = model.dtype_name

    def read(self, value: Any) -> TokenEmbeddings:
        """Return one embedding per token of a prompt.

        Args:
            value: a torch tensor or numpy array [T, embedding size]; base64 of a `torch.save` or
                safetensors file with such a tensor; or a result of this method.

        Raises:
            RequestError: the engine accepts no embeddings, or `value` is something else.
        """
        if isinstance(value, TokenEmbeddings):
            return value
        if not self._is_enabled:
            raise _refused(
                "this engine accepts no embeddings as prompts. Start it with --enable-prompt-embeds"
            )
        self._check_length(value)
        try:
            tensor = dense_tensor(value)
            check_finite(tensor, self._dtype)
        except TensorFileError as error:
            raise _refused(str(error)) from None
        shape = tensor.shape
        if len(shape) == 3 and shape[0] == 1:
            shape = shape[1:]  # transformers accepts a batch dimension of 1
        if len(shape) != 2 or shape[1] != self._size or not shape[0]:
            raise _refused(
                f"the tensor must have the shape [tokens, {self._size}], one embedding of this "
                f"model per token, got {list(tensor.shape)}"
            )
        if shape[0] >= self._max_model_len:
            raise PromptTooLongError(shape[0], self._max_model_len)
        return TokenEmbeddings(start=0, shape=shape, dtype=tensor.dtype, data=tensor.data)

    def _check_length(self, value: Any) -> None:
        """Check the length before the value is decoded or copied."""
        longest = self._max_model_len * self._size * 8
        if isinstance(value, (str, bytes)) and len(value) > 2 * longest + 2**16:
            raise _refused(
                f"it is {len(value)} characters long, more than any prompt of up to "
                f"{self._max_model_len} tokens (max_model_len) needs. Send fewer embeddings"
            )
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) > 1 and shape[-2] >= self._max_model_len:
            raise PromptTooLongError(int(shape[-2]), self._max_model_len)


def cache_keys(embeddings: Iterable[TokenEmbeddings]) -> tuple[CacheKey, ...]:
    """Return the prefix-cache keys of these embeddings, each with the position where it begins."""
    return tuple(CacheKey(part.start, _hash_of(part)) for part in embeddings)


def _hash_of(embeddings: TokenEmbeddings) -> str:
    digest = sha256(repr((embeddings.shape, embeddings.dtype)).encode())
    digest.update(embeddings.data)
    return "embeddings:" + digest.hexdigest()


def needs_tokens(name: str) -> RequestError:
    """Return the error for a field that needs the tokens of the prompt, if the prompt is
    embeddings.
    """
    return RequestError(
        f"{name} needs the tokens of the prompt, and prompt_embeds has none. Leave {name} out",
        param=name,
    )


def _refused(problem: str) -> RequestError:
    return RequestError(f"prompt_embeds: {problem}", param="prompt_embeds")
