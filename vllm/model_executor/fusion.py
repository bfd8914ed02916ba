"""Fuses a model: records its forward pass once, so that one call of the C++ kernels can run it.

To record, the model runs on symbols instead of tensors (`vllm.ops.cpu.symbols`). So this works for
any model family. If an operation or weight cannot be recorded (for example a weight that is not
packed), the model runs layer by layer instead. Independent of batches.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vllm.attention import (
    EncoderAttention,
    LaunchContext,
    RaggedMetadata,
    bind_prompt_caches,
    share_context,
    whole_prompts,
)
from vllm.logger import init_logger
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.media.layer_stack import LayerStack
from vllm.model_executor.models.interface import CausalLM, PoolingModel
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.ops.cpu.operators.program import Program
from vllm.ops.cpu.operators.recorder import Recorder
from vllm.ops.cpu.symbols import Ids, NotFusibleError

logger = init_logger(__name__)

_lock = threading.Lock()
"""Lock while the operator table of the process records."""


def fuse(
    model: CausalLM | PoolingModel, inner_layers: Sequence[int] = (), *, reads_items: bool = False
) -> Program | None:
    """Record the forward pass of a model as a program; the weights must be packed, the caches
    bound.

    With pipeline parallelism each stage is a program; all but the first take hidden states instead
    of token ids.

    Args:
        model: the model to record.
        inner_layers: layers whose inputs the program also returns (`CausalLM.forward_and_inputs`).
        reads_items: whether tokens may see images or sounds by cross-attention.

    Returns:
        The program, whose results are bit-identical to `model.forward`. None if the model cannot be
        recorded and has to run layer by layer.
    """

    def record() -> Program:
        recorder = Recorder(model.dtype)
        positions: Any = Ids(recorder, is_position=True)
        # Stands in for the launch: the program does not depend on its batch or adapters.
        launch: Any = recorder
        context = LaunchContext(
            attention=recorder,
            positions=positions,
            replaced=launch,
            adapters=launch,
            items=launch if reads_items else None,
        )
        with _recording(recorder), share_context(model).running(context):
            given: Any = None
            if not model.stage.is_first:
                given = recorder.given(model.arch.hidden_size)
            inputs: Any = Ids(recorder, is_position=False) if given is None else given
            taps: Any
            result: Any
            if inner_layers:
                assert isinstance(model, CausalLM)
                result, taps = model.forward_and_inputs(inputs, positions, inner_layers)
            else:
                types: tuple[Any, ...] = ()
                if isinstance(model, PoolingModel) and model.num_token_types > 1:
                    types = (Ids(recorder, is_position=False, is_type=True),)
                result, taps = model(inputs, positions, *types), ()
        return Program(recorder, result, given, taps)

    return _fused("forward pass", record)


def fuse_head(model: CausalLM, forward: Program) -> Program | None:
    """Record `model.compute_logits` for the hidden states that `forward` returns.

    None if it cannot be recorded, or if this pipeline stage is not the last and has no head.
    """
    if not model.stage.is_last:
        return None

    def record() -> Program:
        recorder = Recorder(forward.dtype)
        given: Any = recorder.given(forward.width)
        with _recording(recorder):
            result: Any = model.compute_logits(given)
        return Program(recorder, result, given)

    return _fused("output head", record)


def _fused(name: str, record: Callable[[], Program]) -> Program | None:
    if load_cpu_kernels() is None:
        return None
    try:
        program = record()
    except Exception as error:  # a model may use a symbol in a way that only tensors support
        logger.debug("the %s has no fused CPU program and runs layer by layer: %s", name, error)
        return None
    logger.debug("the %s runs as one fused CPU program", name)
    return program


class FusedLayers:
    """Runs the layers of an encoder of images or sounds as one program.

    Args:
        layers: the layers, their weights packed.
        dtype: data type of the hidden states.
    """

    def __init__(self, layers: LayerStack, dtype: torch.dtype) -> None:
        self._layers = layers
        self._dtype = dtype
        self._programs: dict[tuple[int, ...], Program | None] = {}
        """Programs by the layer counts whose hidden states they return, but not the last."""
        self._capacity = (0, 0)
        """Tokens and items for which there is memory for keys and values."""
        self._attention: EncoderAttention | None = None
        self._batch: tuple[tuple[int, int], RaggedMetadata] | None = None

    def __call__(self, x: Tensor, wanted: Collection[int]) -> dict[int, Tensor] | None:
        """Run all layers; see `LayerStack.run`."""
        num_items, num_tokens, width = x.shape
        if x.dtype != self._dtype or not x.is_cpu or not x.numel():
            return None
        self._grow(num_items * num_tokens, num_items)
        last = len(self._layers)
        inner = tuple(sorted(set(wanted) - {0, last}))
        if inner not in self._programs:
            self._programs[inner] = _fused("encoder", lambda: self._record(inner, width))
        program = self._programs[inner]
        if program is None:
            return None
        rows = x.reshape(-1, width)
        batch = self._metadata(num_items, num_tokens)
        result = program.forward(
            rows.clone() if 0 in wanted else rows.contiguous(),
            torch.zeros(1, len(rows), dtype=torch.int64),
            batch.slot_mapping,
            batch.block_tables,
            batch.seq_lens,
            torch.from_numpy(batch.query_start_loc),
            num_decodes=0,
            last_keys=batch.last_keys,
        )
        found = dict(zip((*inner, last), (*program.tapped, result), strict=True))
        states = {count: each.view(x.shape) for count, each in found.items()}
        return states | {0: x} if 0 in wanted else states

    def _grow(self, num_tokens: int, num_items: int) -> None:
        """Make memory for keys and values of this many tokens and items, if there is less."""
        tokens, items = self._capacity
        if num_tokens <= tokens and num_items <= items:
            return
        self._capacity = max(tokens, num_tokens), max(items, num_items)
        self._programs.clear()  # they contain addresses of the memory
        self._attention = None

    def _record(self, inner: tuple[int, ...], width: int) -> Program:
        recorder = Recorder(self._dtype)
        recorder.item_layer = self._layer_of
        x: Any = recorder.given(width)
        given, taps = x, []
        with _recording(recorder):
            for count, layer in enumerate(self._layers, 1):
                x = layer(x)
                if count in inner:
                    taps.append(x)
        return Program(recorder, x, given, taps)

    def _layer_of(self, num_heads: int, head_size: int) -> EncoderAttention:
        """Return the layer that stores keys and values; all layers of the stack share it."""
        if self._attention is None:
            self._attention = EncoderAttention(num_heads, head_size)
            bind_prompt_caches(self._attention, *self._capacity, self._dtype)
        return self._attention

    def _metadata(self, num_items: int, num_tokens: int) -> RaggedMetadata:
        shape = num_items, num_tokens
        if self._batch is None or self._batch[0] != shape:
            self._batch = shape, whole_prompts([num_tokens] * num_items)
        return self._batch[1]


def fuse_layers(encoder: MediaEncoder) -> None:
    """Let each stack of layers of an encoder run as one program, where it can be recorded."""
    for module in encoder.modules():
        if isinstance(module, LayerStack):
            module.run_all = FusedLayers(module, dtype=encoder.dtype)


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    """Let the operators record the calls that get symbols, while the context is open."""
    with _lock, torch.inference_mode():
        before = get_ops()
        if type(before) is not CPUOps:
            raise NotFusibleError(
                f"recording needs the operators of the CPU (CPUOps), got {type(before).__name__}"
            )
        set_ops(recorder)
        try:
            yield
        finally:
            set_ops(before)
