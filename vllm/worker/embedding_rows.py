"""Embeddings of requests, which replace the embeddings of tokens. Models do not know of them.

The module that looks up embeddings is followed by a hook, which puts those of requests over what
was looked up for the placeholders. There is a hook only in an engine that takes embeddings, and it
does nothing in launches without any.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm.errors import ConfigError
from vllm.messages import EngineRequest, IntArray, TokenEmbeddings
from vllm.model_executor.layers.cpu_linear_method import PackedEmbedding
from vllm.model_executor.layers.embedding import (
    ParallelLMHead,
    ReplacedTokens,
    VocabParallelEmbedding,
)
from vllm.worker.launch import Launch


class EmbeddingRows:
    """The embeddings of the requests in the batch, by row.

    Args:
        model: loaded, its weights packed if they are to be.
        device: of the model.

    Raises:
        ConfigError: it is not known where the model looks up embeddings.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, tuple[TokenEmbeddings, ...]] = {}
        self._replaced: ReplacedTokens | None = None
        _find_embedding(model).register_forward_hook(self._replace)

    def add(self, row: int, request: EngineRequest) -> None:
        """A request has taken the row."""
        if request.embeddings:
            self._rows[row] = request.embeddings

    def remove(self, row: int) -> None:
        """The row's request has left."""
        self._rows.pop(row, None)

    def select(self, launch: Launch, starts: IntArray) -> ReplacedTokens | None:
        """What a launch replaces; None: nothing.

        Args:
            launch: n rows.
            starts: [n or more] where the tokens of each row begin among those of the launch.
        """
        if not self._rows:
            return None
        indices, parts = [], []
        for index, row in enumerate(launch.rows.tolist()):
            first = int(launch.num_computed_tokens[index])
            end = first + int(launch.num_scheduled_tokens[index])
            for embeddings in self._rows.get(row, ()):
                begin, stop = max(first, embeddings.start), min(end, embeddings.end)
                if begin < stop:
                    offset = int(starts[index]) - first
                    indices.append(np.arange(begin + offset, stop + offset, dtype=np.int64))
                    parts.append(_read(embeddings, begin, stop))
        if not parts:
            return None
        return ReplacedTokens(
            torch.from_numpy(np.concatenate(indices)).to(self._device),
            torch.cat([part.float() for part in parts]).to(self._device),
        )

    @contextmanager
    def replacing(self, tokens: ReplacedTokens) -> Iterator[None]:
        """A forward pass inside of this takes these embeddings."""
        self._replaced = tokens
        try:
            yield
        finally:
            self._replaced = None

    def _replace(self, module: nn.Module, arguments: Any, found: Tensor) -> Tensor:
        if self._replaced is None:
            return found
        embeddings = self._replaced.embeddings.to(found.dtype)
        return found.index_copy(0, self._replaced.indices, embeddings)


def _find_embedding(model: nn.Module) -> nn.Module:
    """The module that looks up the embeddings of tokens."""
    found = [
        module
        for module in model.modules()
        if isinstance(module, (VocabParallelEmbedding, PackedEmbedding))
        and not isinstance(module, ParallelLMHead)
    ]
    if len(found) != 1:
        raise ConfigError(
            f"enable_prompt_embeds=True needs a model with one table of token embeddings; "
            f"{type(model).__name__} has {len(found)}. Leave it out"
        )
    return found[0]


def _read(embeddings: TokenEmbeddings, begin: int, stop: int) -> Tensor:
    """The embeddings of the positions from `begin` to `stop`; the others are not copied."""
    dtype = getattr(torch, embeddings.dtype)
    size = embeddings.shape[1]
    width = size * dtype.itemsize
    first, end = (position - embeddings.start for position in (begin, stop))
    part = bytearray(memoryview(embeddings.data)[first * width : end * width])
    return torch.frombuffer(part, dtype=dtype).view(-1, size)
