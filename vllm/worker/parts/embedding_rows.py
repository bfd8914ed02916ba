"""Embeddings that requests give (of images, for example), which replace embeddings of tokens.

They are passed in the context of the forward pass, and the embedding layer reads them there. So
model files need no code for them.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vllm.attention import AddedStates, LaunchParts, ReplacedTokens
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.messages import (
    BoolArray,
    EngineRequest,
    IntArray,
    NewRequest,
    RunnerStats,
    SchedulerOutput,
    TokenEmbeddings,
)
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.encoded_media import EncodedMedia, media_runs
from vllm.worker.parts.row_parts import RowPart


class GivenRun(Protocol):
    """Consecutive tokens of a prompt whose embeddings are given.

    Attributes:
        start: index of the first one.
        end: index after the last one.
    """

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    def read(self, begin: int, stop: int) -> Tensor:
        """Return the embeddings [m, embedding_dim] of the tokens from `begin` to `stop`.

        Both are indices in the prompt. The result is on the host, of any floating dtype. Each
        embedding may be followed by embedding_dim values for each of the first layers, which are
        added to the hidden states of its token after that layer.
        """
        ...


@dataclass(frozen=True, slots=True)
class RequestEmbeddings:
    """Embeddings that are part of the request itself."""

    embeddings: TokenEmbeddings

    @property
    def start(self) -> int:
        return self.embeddings.start

    @property
    def end(self) -> int:
        return self.embeddings.end

    def read(self, begin: int, stop: int) -> Tensor:
        """Return the embeddings of these tokens, without copying others."""
        dtype = getattr(torch, self.embeddings.dtype)
        size = self.embeddings.shape[1]
        width = size * dtype.itemsize
        first, end = (index - self.embeddings.start for index in (begin, stop))
        part = bytearray(memoryview(self.embeddings.data)[first * width : end * width])
        return torch.frombuffer(part, dtype=dtype).view(-1, size)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a forward pass whose embeddings are given."""

    first: int
    """Index of the first token in the forward pass that an embedding replaces."""
    run: GivenRun
    """Run of embeddings from which the entries `begin` to `stop`, indices of the prompt, are
    used."""
    begin: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.begin

    def read(self) -> Tensor:
        """Return the embeddings, [m, embedding_dim or a multiple of it] float32."""
        return self.run.read(self.begin, self.stop).float()


class EmbeddingRows(RowPart):
    """The embeddings that requests in the batch give, by batch index.

    Args:
        model: loaded, its weights packed if they are to be; None: another pipeline stage looks up
            embeddings.
        num_rows: number of rows of the batch.
        device: device of the model.
        media: the embeddings of images; None: the model takes no images, or another pipeline stage
            looks up embeddings.

    Raises:
        ConfigError: the model does not have exactly one embedding layer.
    """

    def __init__(
        self,
        model: nn.Module | None,
        num_rows: int,
        device: torch.device,
        media: EncodedMedia | None = None,
    ) -> None:
        self._device = device
        self._embedding_dim = None if model is None else _find_embedding(model).embedding_dim
        self._media = media
        self._ends: IntArray = np.zeros(num_rows, np.int32)
        """[rows] position after the last embedding of each request; 0: it has none."""
        self._rows: dict[int, tuple[GivenRun, ...]] = {}

    def prepare(self, request: EngineRequest) -> Future[str] | None:
        return None if self._media is None else self._media.prepare(request)

    def release(self, request_ids: Iterable[str]) -> None:
        if self._media is not None:
            self._media.release(request_ids)

    def add(self, new: NewRequest) -> None:
        runs: list[GivenRun] = [RequestEmbeddings(each) for each in new.request.embeddings]
        runs += media_runs(new.row, new.request, self._media)
        if runs:
            self._rows[new.row] = tuple(runs)
            self._ends[new.row] = max(run.end for run in runs)

    def remove(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._ends[row] = 0
        if self._media is not None:
            self._media.remove(row)

    def begin(self, step: SchedulerOutput) -> None:
        """Drop and encode images, as the step says."""
        if self._media is not None:
            self._media.update(step)

    def count(self, stats: RunnerStats) -> RunnerStats:
        return stats if self._media is None else self._media.count(stats)

    def errors_of(self, rows: IntArray) -> dict[int, str]:
        return {} if self._media is None else self._media.errors_of(rows)

    def needs_prefill(self, rows: IntArray, indices: IntArray) -> BoolArray | None:
        """Return which tokens have given embeddings: they need a prefill, decodes only read token
        ids.
        """
        if not self._rows:
            return None
        return indices < self._ends[rows]

    def spans(self, launch: Launch) -> Iterator[Span]:
        """Yield the given embeddings in a forward pass."""
        starts = launch.starts
        has_some = launch.num_computed_tokens < self._ends[launch.rows]
        for index in np.flatnonzero(has_some).tolist():
            first = int(launch.num_computed_tokens[index])
            end = first + int(launch.num_scheduled_tokens[index])
            for run in self._rows[int(launch.rows[index])]:
                begin, stop = max(first, run.start), min(end, run.end)
                if begin < stop:
                    yield Span(int(starts[index]) + begin - first, run, begin, stop)

    def part_of(self, launch: Launch) -> LaunchParts:
        if not self._rows:
            return {}
        found = list(self.spans(launch))
        if not found:
            return {}
        assert self._embedding_dim is not None
        # The first block is the embedding of each token; the others are added to hidden states.
        blocks = [span.read().split(self._embedding_dim, dim=1) for span in found]
        indices = [torch.arange(span.first, span.first + len(span)) for span in found]
        embeddings = torch.cat([first for first, *_ in blocks]).to(self._device)
        parts: LaunchParts = {
            "replaced": ReplacedTokens(torch.cat(indices).to(self._device), embeddings)
        }
        if added := [index for index, each in enumerate(blocks) if len(each) > 1]:
            values = [
                torch.cat(each).to(self._device)
                for each in zip(*(blocks[index][1:] for index in added), strict=True)
            ]
            tokens = torch.cat([indices[index] for index in added]).to(self._device)
            parts["added"] = AddedStates(tokens, tuple(values))
        return parts


def takes_embeddings(config: VllmConfig) -> bool:
    """Return whether requests may give embeddings, or images that are encoded to embeddings."""
    model = config.model
    return model.enable_prompt_embeds or model.resolved_arch.media_config is not None


def _find_embedding(model: nn.Module) -> VocabParallelEmbedding:
    """Return the embedding layer of a model; raise if it has none or several."""
    found = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if len(found) != 1:
        raise ConfigError(
            "enable_prompt_embeds=True and image input need a model with exactly one table of "
            f"token embeddings, but {type(model).__name__} has {len(found)}. Leave "
            "enable_prompt_embeds out, and send no images"
        )
    return found[0]
