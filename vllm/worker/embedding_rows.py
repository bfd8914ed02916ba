"""Embeddings of requests, which replace the embeddings of tokens. Model files do not know of them.

They travel in the context of a launch; the layer that looks up embeddings reads them there.
"""

import numpy as np
import torch
from torch import Tensor, nn

from vllm.attention import ReplacedTokens
from vllm.errors import ConfigError
from vllm.messages import EngineRequest, IntArray, TokenEmbeddings
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.worker.launch import Launch


class EmbeddingRows:
    """The embeddings of the requests in the batch, by row.

    Args:
        model: loaded, its weights packed if they are to be.
        device: of the model.

    Raises:
        ConfigError: the model does not have exactly one layer that looks up embeddings.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, tuple[TokenEmbeddings, ...]] = {}
        _check_embedding(model)

    def add(self, row: int, request: EngineRequest) -> None:
        """Place a request in the row."""
        if request.embeddings:
            self._rows[row] = request.embeddings

    def remove(self, row: int) -> None:
        """Clear the row."""
        self._rows.pop(row, None)

    def select(self, launch: Launch, starts: IntArray) -> ReplacedTokens | None:
        """The embeddings that a launch has to replace; None if there are none.

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


def _check_embedding(model: nn.Module) -> None:
    """Refuse a model in which not exactly one layer would read the embeddings."""
    found = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if len(found) != 1:
        raise ConfigError(
            f"enable_prompt_embeds=True needs a model with one table of token embeddings; "
            f"{type(model).__name__} has {len(found)}. Leave it out"
        )


def _read(embeddings: TokenEmbeddings, begin: int, stop: int) -> Tensor:
    """The embeddings of the positions from `begin` to `stop`; the others are not copied."""
    dtype = getattr(torch, embeddings.dtype)
    size = embeddings.shape[1]
    width = size * dtype.itemsize
    first, end = (position - embeddings.start for position in (begin, stop))
    part = bytearray(memoryview(embeddings.data)[first * width : end * width])
    return torch.frombuffer(part, dtype=dtype).view(-1, size)
