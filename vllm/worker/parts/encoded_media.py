"""Stores the embeddings of images on the host of a worker, by the key of the image.

The scheduler decides which images are encoded, and which are dropped. If an image is missing when
its tokens run, it is encoded then: this costs time, but is never an error.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
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

    def encode(self, items: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        """Encode images: return the embeddings [n, width] of each, on the host.

        Args:
            items: the tensors of each image, on the host.
        """
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

    @torch.inference_mode()
    def encode(self, items: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        """Encode images one by one, or together if they have a fixed size.

        Attention over the patches of several images of any size would compare all of them.
        """
        if self._encoder.unit == "patches":
            return [self._encoder([item])[0] for item in items]
        return [each.clone() for each in self._encoder.encode_parts(items, self._encoder)]


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
        self._items: dict[int, tuple[MediaItem, ...]] = {}
        """Media items by batch index."""
        self._request_ids: dict[int, str] = {}
        """Id of the request, by row of the batch."""
        self._files: dict[str, dict[str, OpenFile]] = {}
        """Id of a request -> path -> open file."""
        self._errors: dict[int, str] = {}
        """By batch index: the reason why an image cannot be encoded."""
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
        """Drop and encode images, as the step says."""
        for key in step.dropped_media:
            self._kept.pop(key, None)
        if step.encoded_media:
            wanted = [(row, self._items[row][index]) for row, index in step.encoded_media]
            self._encode([each for each in wanted if each[1].key not in self._kept])

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
            self._encode([(row, item)])
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

    def _encode(self, wanted: Sequence[tuple[int, MediaItem]]) -> None:
        """Encode images; each is then stored either on all ranks or on none."""
        self._encode_here(wanted)
        if self._agree is None or not wanted:
            return
        are_kept = self._agree([item.key in self._kept for _, item in wanted])
        for (row, item), is_kept in zip(wanted, are_kept, strict=True):
            if not is_kept:
                self._kept.pop(item.key, None)
                reason = f"{singular(item.modality)} cannot be encoded: another rank has failed"
                self._errors.setdefault(row, reason)

    def _encode_here(self, wanted: Sequence[tuple[int, MediaItem]]) -> None:
        """Encode images together.

        If that fails, one by one, so that only the faulty image fails.
        """
        read: list[tuple[int, MediaItem, dict[str, Tensor]]] = []
        for row, item in wanted:
            try:
                tensors = _tensors(item.tensors, self._files_of(row))
                if EMBEDDINGS in tensors:
                    self._keep(item, tensors[EMBEDDINGS].to(self._dtype))
                else:
                    read.append((row, item, tensors))
            except (OSError, ValueError) as error:
                self._errors[row] = f"{singular(item.modality)} cannot be read: {error}"
        if not read:
            return
        try:
            began = time.monotonic()
            found = self._encoder.encode([tensors for _, _, tensors in read])
            self.encode_seconds += time.monotonic() - began
            for (_, item, _), embeddings in zip(read, found, strict=True):
                self._keep(item, embeddings)
                self.num_encoded += 1
        except (RuntimeError, ValueError) as error:
            if len(read) > 1:
                for row, item, _ in read:
                    if item.key not in self._kept:
                        self._encode_here([(row, item)])
                return
            ((row, item, _),) = read
            logger.exception("%s cannot be encoded", singular(item.modality).capitalize())
            self._errors[row] = f"{singular(item.modality)} cannot be encoded: {error}"

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
