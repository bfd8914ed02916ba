"""Stores the embeddings of images on the host of a worker, by the key of the image.

The scheduler decides which images are encoded, and which are dropped. If an image is missing when
its tokens run, it is encoded then: this costs time, but is never an error.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from vllm.distributed import TPGroup
from vllm.inputs import singular
from vllm.logger import init_logger
from vllm.messages import (
    EngineRequest,
    IntArray,
    MediaItem,
    MediaTensor,
    RunnerStats,
    SchedulerOutput,
)
from vllm.model_executor.fusion import fuse_layers
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.models.interface import LayeredModel
from vllm.multimodal.interface.family import EMBEDDINGS
from vllm.multimodal.media_file import OpenFile, open_files, read_tensor

logger = init_logger(__name__)


class Encodes(Protocol):
    """Runs the encoder of a model on its device."""

    def divide(self, item: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """Divide an image into parts; see `MediaEncoder.divide`."""
        ...

    def encode(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode parts of images: return the embeddings [n, width] of each, on the host.

        Args:
            parts: the tensors of each part, on the host.
        """
        ...

    def join(self, found: Sequence[Tensor], item: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings [n, width] of an image; see `MediaEncoder.join`."""
        ...


class KeepsMedia(Protocol):
    """Storage for the results of an encoder, by the key of the image.

    It is a dictionary, or an object whose `get` returns something else than was stored, such as
    slots.
    """

    def __contains__(self, key: str) -> bool: ...

    def __setitem__(self, key: str, result: Tensor) -> None:
        """Store the result [n, width] of an image.

        Raises:
            ValueError: there is not enough space for it.
        """
        ...

    def get(self, key: str) -> Tensor | None:
        """Return the stored result of an image; None if there is none."""
        ...

    def pop(self, key: str, default: None) -> Tensor | None:
        """Drop an image, if it is stored."""
        ...


class ModuleEncoder:
    """Runs an encoder without padding; see `Encodes`.

    Args:
        encoder: loaded.
    """

    def __init__(self, encoder: MediaEncoder) -> None:
        self._encoder = encoder
        fuse_layers(encoder)

    def divide(self, item: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        return self._encoder.divide(item)

    @torch.inference_mode()
    def encode(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        # Copied, so that the result of all parts does not occupy memory while one of them is kept.
        return [each.clone() for each in self._encoder.encode_parts(parts)]

    def join(self, found: Sequence[Tensor], item: Mapping[str, Tensor]) -> Tensor:
        return self._encoder.join(found, item)


def encoded_media(model: LayeredModel) -> "EncodedMedia | None":
    """Make the storage for image embeddings of a model on the CPU; None if it reads only text.

    Args:
        model: loaded; the first stage of a pipeline.
    """
    if not (width := embedding_width(model)) or model.media_encoder is None:
        return None
    encoder, agree = model.media_encoder, agreement(model.tp)
    return EncodedMedia(ModuleEncoder(encoder), width, agree=agree, dtype=encoder.dtype)


Agree = Callable[[Sequence[bool]], Sequence[bool]]
"""Takes whether this rank has encoded each image; returns whether all ranks have."""


def agreement(tp: TPGroup, add: Callable[[Tensor], Tensor] | None = None) -> Agree | None:
    """Return a function by which ranks agree on the images that all of them have encoded.

    A rank without an image would compute other values than the others. None: there is only one
    rank.

    Args:
        tp: the ranks.
        add: returns the sum over the ranks of a tensor [n] float32 on the host; None: the ranks
            exchange tensors on the host.
    """
    total = add or tp.all_reduce

    def agree(is_there: Sequence[bool]) -> Sequence[bool]:
        counts = total(torch.tensor(is_there, dtype=torch.float32))
        return [count == tp.size for count in counts.tolist()]

    return None if tp.size == 1 else agree


def embedding_width(model: LayeredModel) -> int:
    """Return the width of image embeddings, including values for layers (`MediaEncoder.num_added`).

    0: the model, or this pipeline stage, does not make any.
    """
    encoder = model.media_encoder
    if encoder is None or not model.stage.is_first or encoder.max_states:
        return 0
    return model.embedding.embedding_dim * (1 + encoder.num_added)


@dataclass(slots=True)
class _Work:
    """Parts of an image to encode."""

    row: int
    item: MediaItem
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """An image of which not all parts are encoded."""

    tensors: Mapping[str, Tensor]
    parts: Sequence[Mapping[str, Tensor]]
    found: list[Tensor]
    """Embeddings of the first parts."""


class EncodedMedia:
    """Encodes images of one model, and stores their embeddings.

    Args:
        encoder: encoder of the model.
        width: see the attribute.
        kept: the storage; None: a dictionary.
        agree: agrees on encoded images with the other ranks; None: there are no other ranks.
        dtype: data type of the encoder; embeddings that requests give are stored in it as well.

    Attributes:
        width: width of the embeddings, including the values of `MediaEncoder.num_added` layers.
        num_encoded: number of items that were encoded.
        encode_seconds: seconds that this took.
    """

    def __init__(
        self,
        encoder: Encodes,
        width: int,
        kept: KeepsMedia | None = None,
        agree: Agree | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._encoder, self._dtype = encoder, dtype
        self.width = width
        self._agree = agree
        self._kept: KeepsMedia = {} if kept is None else kept
        self._begun: dict[str, _Begun] = {}
        """Images of which only some parts are encoded, by key."""
        self._items: dict[int, tuple[MediaItem, ...]] = {}
        """Media items by batch index."""
        self._request_ids: dict[int, str] = {}
        """Ids of the requests, by batch index."""
        self._files: dict[str, dict[str, OpenFile]] = {}
        """Id of a request -> path -> open file."""
        self._errors: dict[int, str] = {}
        """Reasons why an image cannot be encoded, by batch index."""
        self.num_encoded = 0
        self.encode_seconds = 0.0

    def prepare(self, request: EngineRequest) -> Future[str] | None:
        """Open the image files of a request, and keep them open until it has ended.

        So all ranks can read them even if the process that made them ends.

        Returns:
            A future with the reason why they cannot be opened. None: they are open, or there are
            none.
        """
        try:
            files = open_files(chain.from_iterable(item.tensors for item in request.media))
        except (OSError, ValueError) as error:
            refused: Future[str] = Future()
            refused.set_result(f"the file of an image or sound cannot be read: {error}")
            return refused
        if files:
            self._files[request.request_id] = files
        return None

    def release(self, request_ids: Iterable[str]) -> None:
        """Close the files of requests that have ended."""
        for request_id in request_ids:
            self._files.pop(request_id, None)

    def add(self, row: int, request: EngineRequest) -> None:
        """Note the images of a new request."""
        self._items[row] = request.media
        self._request_ids[row] = request.request_id

    def remove(self, row: int) -> None:
        """Forget the images of a request; their embeddings remain stored."""
        self._items.pop(row, None)
        self._request_ids.pop(row, None)
        self._errors.pop(row, None)

    def update(self, step: SchedulerOutput) -> None:
        """Drop images, and encode images and parts of them, as the step says."""
        for key in step.dropped_media:
            self._kept.pop(key, None)
            self._begun.pop(key, None)
        wanted: dict[str, _Work] = {}
        for row, index, first, end in step.encoded_media:
            item = self._items[row][index]
            if item.key in wanted:
                wanted[item.key].end = end  # another request has the parts before
            elif item.key not in self._kept and (not first or item.key in self._begun):
                wanted[item.key] = _Work(row, item, first, end)
        self._encode(list(wanted.values()))

    def read(self, row: int, item: MediaItem) -> Tensor:
        """Return the embeddings [n, width] of an image of a request.

        Zeros if it cannot be encoded; then `errors_of` returns the reason.
        """
        found = self.find(row, item)
        if found is None:
            return torch.zeros(item.num_embeddings, self.width)
        return found

    def find(self, row: int, item: MediaItem) -> Tensor | None:
        """Return the stored result for an image of a request; encode it first if needed.

        None if it cannot be encoded; then `errors_of` returns the reason.
        """
        if item.key not in self._kept and row not in self._errors:
            self._encode([_Work(row, item, 0, item.num_parts)])
        return self._kept.get(item.key)

    def count(self, stats: RunnerStats) -> RunnerStats:
        """Return the counters with the number of encoded items and the encoding time added."""
        return msgspec.structs.replace(
            stats, num_encoded_items=self.num_encoded, encode_seconds=self.encode_seconds
        )

    def errors_of(self, rows: IntArray) -> dict[int, str]:
        """Return batch index -> why an image of the request cannot be encoded, for failed ones of
        these.
        """
        if not self._errors:
            return {}
        return {row: self._errors[row] for row in rows.tolist() if row in self._errors}

    def _encode(self, wanted: Sequence[_Work]) -> None:
        """Encode images or parts; each result is then stored either on all ranks or on none."""
        self._encode_here(wanted)
        if self._agree is None or not wanted:
            return
        are_done = self._agree([self._is_done(work) for work in wanted])
        for work, is_done in zip(wanted, are_done, strict=True):
            if not is_done:
                self._kept.pop(work.item.key, None)
                self._begun.pop(work.item.key, None)
                name = singular(work.item.modality)
                reason = f"{name} cannot be encoded: another rank has failed"
                self._errors.setdefault(work.row, reason)

    def _is_done(self, work: _Work) -> bool:
        """Return whether all parts up to the last one of this work are encoded."""
        begun = self._begun.get(work.item.key)
        return work.item.key in self._kept or (begun is not None and len(begun.found) == work.end)

    def _encode_here(self, wanted: Sequence[_Work]) -> None:
        """Encode images or parts together.

        If that fails, one by one, so that only the faulty image fails.
        """
        read: list[tuple[_Work, _Begun]] = []
        for work in wanted:
            item = work.item
            try:
                begun = self._begin(work)
                if begun is not None:
                    read.append((work, begun))
            except (OSError, ValueError) as error:
                self._errors[work.row] = f"{singular(item.modality)} cannot be read: {error}"
        if not read:
            return
        try:
            began = time.monotonic()
            parts = [part for work, begun in read for part in begun.parts[work.first : work.end]]
            found = iter(self._encoder.encode(parts))
            self.encode_seconds += time.monotonic() - began
            for work, begun in read:
                more = list(islice(found, work.end - work.first))
                self._store(work, replace(begun, found=[*begun.found, *more]))
        except (RuntimeError, ValueError) as error:
            if len(read) > 1:
                for work, _ in read:
                    if not self._is_done(work):
                        self._encode_here([work])
                return
            ((work, _),) = read
            name = singular(work.item.modality)
            logger.exception("%s cannot be encoded", name.capitalize())
            self._begun.pop(work.item.key, None)
            self._errors[work.row] = f"{name} cannot be encoded: {error}"

    def _begin(self, work: _Work) -> _Begun | None:
        """Return the parts of an image and what is encoded of it.

        None: the request has its embeddings, and they are stored now.

        Raises:
            OSError, ValueError: the image cannot be read.
        """
        item = work.item
        if work.first:
            return self._begun[item.key]
        tensors = _tensors(item.tensors, self._files_of(work.row))
        if EMBEDDINGS in tensors:
            self._keep(item, tensors[EMBEDDINGS].to(self._dtype))
            return None
        parts = self._encoder.divide(tensors)
        if len(parts) != item.num_parts:
            raise ValueError(f"it must have {item.num_parts} parts, got {len(parts)}")
        return _Begun(tensors, parts, [])

    def _store(self, work: _Work, begun: _Begun) -> None:
        """Store an image if all of its parts are encoded, else the parts."""
        item = work.item
        if work.end < item.num_parts:
            self._begun[item.key] = begun
            return
        self._keep(item, self._encoder.join(begun.found, begun.tensors))
        self._begun.pop(item.key, None)
        self.num_encoded += 1

    def _files_of(self, row: int) -> Mapping[str, OpenFile]:
        return self._files.get(self._request_ids[row], {})

    def _keep(self, item: MediaItem, embeddings: Tensor) -> None:
        if embeddings.shape != (item.num_embeddings, self.width):
            raise ValueError(
                f"the embeddings of this item must have the shape [{item.num_embeddings}, "
                f"{self.width}], got {list(embeddings.shape)}"
            )
        self._kept[item.key] = embeddings


@dataclass(frozen=True, slots=True)
class MediaRun:
    """Consecutive tokens of a prompt whose embeddings an image gives; see `GivenRun`."""

    row: int
    item: MediaItem
    start: int
    end: int
    offset: int
    """Embedding of the image that the first token has."""
    media: EncodedMedia | None
    """Storage of the embeddings; None: another stage of the pipeline reads them, and this stage
    only plans the same forward passes."""

    def read(self, begin: int, stop: int) -> Tensor:
        """Return the embeddings of the tokens from `begin` to `stop`."""
        assert self.media is not None
        first = self.offset + begin - self.start
        return self.media.read(self.row, self.item)[first : first + stop - begin]


def media_runs(row: int, request: EngineRequest, media: EncodedMedia | None) -> Iterable[MediaRun]:
    """Note the images of a request, and return the runs of tokens that they give embeddings to.

    Args:
        row: batch index of the request.
        request: the request.
        media: the embeddings; None: another pipeline stage has them.
    """
    if request.media and media is not None:
        media.add(row, request)
    runs: list[MediaRun] = []
    for item in request.media:
        offset = 0
        for start, count in item.runs:
            runs.append(MediaRun(row, item, start, start + count, offset, media))
            offset += count
    return runs


def _tensors(arrays: Iterable[MediaTensor], files: Mapping[str, OpenFile]) -> dict[str, Tensor]:
    """Read the tensors of an image, from the request or from its open files.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not open, or has the wrong size.
    """
    return {array.name: torch.from_numpy(read_tensor(array, files)) for array in arrays}
