"""Fuses a model: records its forward pass once, so that one call of the C++ kernels can run it.

To record, the model runs on symbols instead of tensors (`vllm.ops.cpu.symbols`). So this works for
any model family. If an operation or weight cannot be recorded (for example a weight that is not
packed), the model runs layer by layer instead. Independent of batches.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm.attention import LaunchContext, share_context
from vllm.logger import init_logger
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
