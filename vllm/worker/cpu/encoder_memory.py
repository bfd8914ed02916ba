"""Computes the memory of the encoder's largest forward pass, without values.

The encoder runs once on tensors without values, which takes a fraction of a second. The bytes of
the tensors that exist at the same time are counted.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
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
    """Counts the bytes of the tensors that operators create while the mode is active.

    Attributes:
        peak: largest number of bytes of tensors that existed at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._num_bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is not used while this mode is active

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count the storages that it created."""
        result = self.run(func, args, kwargs or {})
        known = {id(each.untyped_storage()) for each in tree_leaves(args) if _is_tensor(each)}
        for each in tree_leaves(result):
            if _is_tensor(each) and id(each.untyped_storage()) not in known:
                self._count(each.untyped_storage())
        self.peak = max(self.peak, self._num_bytes)
        return result

    def run(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and return its result; subclasses replace how."""
        return func(*args, **kwargs)

    def _count(self, storage: Any) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def on_freed(_: object) -> None:
            del self._alive[key]
            self._num_bytes -= num_bytes

        self._alive[key] = weakref.ref(storage, on_freed)
        self._num_bytes += num_bytes


class PeakWithoutValues(PeakBytes):
    """Counts the bytes of tensors without values.

    For some operators torch computes the shapes in Python and imports its compiler for it, which
    takes more than a second. So their shapes are computed here.
    """

    def run(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = _SHAPES[func](*args, **kwargs) if func in _SHAPES else None
        return super().run(func, args, kwargs) if result is None else result


def _made(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the shape and memory order of another one, as elementwise
    operators do.
    """
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return _made(x.shape, dtype)
        expected *= size
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")


def _binary(one: Any, other: Any, **_: Any) -> Tensor | None:
    """Return the result of an elementwise operator on two arguments; None if its shape is not
    known.

    The second argument may be a number.
    """
    dtype = torch.result_type(one, other)
    if not dtype.is_floating_point:
        return None
    whole = [each for each in (one, other) if isinstance(each, Tensor)]
    shape = np.broadcast_shapes(*(each.shape for each in whole))
    like = next((each for each in whole if each.shape == shape), None)
    return _made(shape, dtype) if like is None else _like(like, dtype)


def _compared(one: Tensor, other: Any) -> Tensor:
    shapes = [each.shape for each in (one, other) if isinstance(each, Tensor)]
    return _made(np.broadcast_shapes(*shapes), torch.bool)


def _unary(x: Tensor, *_: Any, **__: Any) -> Tensor | None:
    return _like(x, x.dtype) if x.is_floating_point() else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _made((*x.shape[:-1], len(weight)), x.dtype)


def _matmul(one: Tensor, other: Tensor) -> Tensor | None:
    if min(one.ndim, other.ndim) < 2:
        return None
    outer = np.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    return _made((*outer, one.shape[-2], other.shape[-1]), one.dtype)


def _arange(end: Any, *, dtype: Any = None, **_: Any) -> Tensor | None:
    return _made((end,), dtype or torch.int64) if isinstance(end, int) else None


def _mean(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
    if (not isinstance(dim, int) and not dim) or dtype is not None:
        return None
    dims = {each % x.ndim for each in ([dim] if isinstance(dim, int) else dim)}
    sizes = [(1 if at in dims else size, at in dims) for at, size in enumerate(x.shape)]
    return _made([size for size, is_reduced in sizes if keepdim or not is_reduced], x.dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any(each.dtype != first.dtype or each.ndim != first.ndim for each in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return _made(shape, first.dtype)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    return _cat([each.unsqueeze(dim) for each in tensors], dim)


_ATEN = torch.ops.aten
_SHAPES: Mapping[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys(
        (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor), _binary
    ),
    **dict.fromkeys((_ATEN.eq.Tensor, _ATEN.lt.Tensor), _compared),
    **dict.fromkeys(
        (
            _ATEN.gelu.default,
            _ATEN.sigmoid.default,
            _ATEN.silu.default,
            _ATEN.tanh.default,
            _ATEN.rsqrt.default,
        ),
        _unary,
    ),
    **dict.fromkeys((_ATEN.pow.Tensor_Scalar, _ATEN.rsub.Scalar, _ATEN.layer_norm.default), _unary),
    _ATEN.linear.default: _linear,
    _ATEN.matmul.default: _matmul,
    _ATEN.arange.default: _arange,
    _ATEN.mean.dim: _mean,
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
}
"""Operators whose shapes torch computes in Python, and their results without values."""


def encoder_bytes(config: VllmConfig, encoder: MediaEncoder) -> int:
    """Return the bytes that the largest forward pass of an encoder needs in addition to its
    weights.

    Args:
        config: config of the engine.
        encoder: loaded.
    """
    family = family_of_model(config)
    assert family is not None
    began = time.monotonic()
    largest = largest_image(family, config.multimodal.largest_image)
    item = {name: torch.from_numpy(array) for name, array in largest.tensors.items()}
    parts = encoder.divide(item)
    if encoder.max_at_once is not None:
        parts = (parts * encoder.max_at_once)[: encoder.max_at_once]
    given = encoder.prepare(parts)
    try:
        peak = peak_bytes(config, given)
    except NotImplementedError as error:  # an operator reads values, which fake tensors lack
        logger.warning(
            "cannot estimate the memory of the image or sound encoder, so none is reserved for "
            "it: %s",
            error,
        )
        return 0
    num_units = sum(encoder.size_of(part) for part in parts)
    max_units = encoder.max_units(config.scheduler.max_model_len)
    if max_units is not None:
        # Videos can be larger than the largest image. Items that do not fit into max_model_len are
        # refused, so they need no memory.
        frames = config.multimodal.video.num_frames
        allowed = [each for each in family.modalities if config.multimodal.counts[each]]
        counts = [num_embeddings(family, family.largest_of(each, frames)) for each in allowed]
        largest_units = encoder.max_units(max(counts, default=0)) or num_units
        peak = peak * min(max_units, largest_units) // num_units
    num_items = 1
    # One step can encode several items of this kind together.
    if encoder.unit != "patches" and encoder.max_at_once is None:
        largest_size = max(1, num_embeddings(family, largest))
        num_items = max(1, config.scheduler.encoder_budget // largest_size)
    logger.info(
        "start: the encoder needs up to %s for %s; computing this took %.2f s",
        format_bytes(num_items * peak),
        f"{num_items} {encoder.unit}" if num_items > 1 else "the largest item",
        time.monotonic() - began,
    )
    return num_items * peak


def peak_bytes(config: VllmConfig, given: Mapping[str, Tensor]) -> int:
    """Return the peak bytes of one forward pass of the encoder, its arguments included.

    Args:
        config: config of the engine.
        given: arguments of `MediaEncoder.run`.
    """
    with _shape_ops(), torch.inference_mode():
        encoder = _without_values(config)
        arguments = {name: each.to("meta") for name, each in given.items()}
        with PeakWithoutValues() as count, torch.device("meta"):
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
    """Operators that only create tensors of the shapes that the CPU operators would create."""

    def full_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Return a result without values, after allocating the temporaries of the CPU kernel.

        The kernel reads a part of the keys at a time, so it keeps one sum per query, and no
        attention weights. It copies a mask to the dtype of the query.
        """
        copied = None if mask is None else mask.to(query.dtype)
        sums = torch.empty(query.shape[:3], dtype=torch.float32, device="meta")
        result = _like(query, query.dtype)
        del copied, sums
        return result


@contextmanager
def _shape_ops() -> Iterator[None]:
    """Use operators that need no values, while the context is open: kernels would read
    addresses.
    """
    before = get_ops()
    set_ops(_ShapeOps())
    try:
        yield
    finally:
        set_ops(before)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
