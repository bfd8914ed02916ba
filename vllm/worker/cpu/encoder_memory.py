"""The memory of the largest forward pass of the encoder of a model, without running it.

The encoder runs once on tensors without values, which takes a fraction of a second. The bytes of
the tensors that exist at the same time are counted.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm.bucketing import format_bytes
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.models.text_of_images import make_encoder
from vllm.multimodal.job import family_of_model, largest_image, num_embeddings
from vllm.ops import get_ops, set_ops
from vllm.ops.native.operators import NativeOps

logger = init_logger(__name__)


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make while it is entered.

    Attributes:
        peak: most bytes of tensors that existed at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._num_bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in it

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count the storages that it has made."""
        result = func(*args, **(kwargs or {}))
        known = {id(each.untyped_storage()) for each in tree_leaves(args) if _is_tensor(each)}
        for each in tree_leaves(result):
            if _is_tensor(each) and id(each.untyped_storage()) not in known:
                self._count(each.untyped_storage())
        self.peak = max(self.peak, self._num_bytes)
        return result

    def _count(self, storage: Any) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def forget(_: object) -> None:
            del self._alive[key]
            self._num_bytes -= num_bytes

        self._alive[key] = weakref.ref(storage, forget)
        self._num_bytes += num_bytes


def encoder_bytes(config: VllmConfig, encoder: MediaEncoder) -> int:
    """Return the bytes that the largest forward pass of an encoder needs next to its weights.

    Args:
        config: of the engine.
        encoder: loaded.
    """
    family = family_of_model(config)
    assert family is not None
    began = time.monotonic()
    largest = largest_image(family, config.multimodal.largest_image)
    item = {name: torch.from_numpy(array) for name, array in largest.tensors.items()}
    parts = encoder.divide(item)
    if encoder.most_at_once is not None:
        parts = (parts * encoder.most_at_once)[: encoder.most_at_once]
    given = encoder.prepare(parts)
    try:
        peak = peak_bytes(config, given)
    except NotImplementedError as error:  # an operator that reads values
        logger.warning("the memory of the encoder is not known before it runs: %s", error)
        return 0
    num_units = sum(encoder.size_of(part) for part in parts)
    most_units = encoder.most_units(config.scheduler.max_model_len)
    if most_units is not None:
        # A video may be larger than each image, and a larger item has no room in a prompt.
        frames = config.multimodal.video.num_frames
        allowed = [each for each in family.modalities if config.multimodal.counts[each]]
        counts = [num_embeddings(family, family.largest_of(each, frames)) for each in allowed]
        largest_units = encoder.most_units(max(counts, default=0)) or num_units
        peak = peak * min(most_units, largest_units) // num_units
    num_items = 1
    # A step encodes such items together.
    if encoder.unit != "patches" and encoder.most_at_once is None:
        largest_size = max(1, num_embeddings(family, largest))
        num_items = max(1, config.scheduler.encoder_budget // largest_size)
    logger.info(
        "start: the encoder needs up to %s for %s; counting took %.2f s",
        format_bytes(num_items * peak),
        f"{num_items} {encoder.unit}" if num_items > 1 else "the largest item",
        time.monotonic() - began,
    )
    return num_items * peak


def peak_bytes(config: VllmConfig, given: Mapping[str, Tensor]) -> int:
    """Return the peak of the bytes of a forward pass of the encoder, its arguments included.

    Args:
        config: of the engine.
        given: arguments of `MediaEncoder.run`.
    """
    with _shape_ops(), torch.inference_mode():
        encoder = _without_values(config)
        arguments = {name: each.to("meta") for name, each in given.items()}
        with PeakBytes() as count, torch.device("meta"):
            encoder.run(**arguments)
    return count.peak + sum(each.nbytes for each in given.values())


def _without_values(config: VllmConfig) -> MediaEncoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.model.dtype_name))
    try:
        with torch.device("meta"):
            return make_encoder(config.model.resolved_arch)
    finally:
        torch.set_default_dtype(before)


class _ShapeOps(NativeOps):
    """Makes tensors of the shapes that operators on the CPU make."""

    def full_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Return a result without values. The CPU reads a part of the keys at a time, so it keeps
        one sum per query, and no weights; it copies a mask to the dtype of the query."""
        copied = None if mask is None else mask.to(query.dtype)
        sums = torch.empty(query.shape[:3], dtype=torch.float32, device="meta")
        result = torch.empty_like(query)
        del copied, sums
        return result


@contextmanager
def _shape_ops() -> Iterator[None]:
    """Use operators that read no values: the kernels read addresses."""
    before = get_ops()
    set_ops(_ShapeOps())
    try:
        yield
    finally:
        set_ops(before)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
