"""Check one decoder layer of a model over a large KV cache, against the host."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from vllm.config import VllmConfig
from vllm.hpu_check.check import MAX_STEP_S, Comparison, Outcome
from vllm.hpu_check.layer_harness import (
    CONTEXT_LENS,
    SEQ_LENS,
    LayerTestHarness,
    config_of,
    num_blocks_of,
    unsupported_is_skipped,
)
from vllm.hpu_check.stopwatch import shortest_s
from vllm.platforms.habana.bridge import DeviceCounters, HabanaBridge
from vllm.worker.hpu.launches.execution import CompiledExecution, Execution, GraphExecution
from vllm.worker.hpu.launches.model import HPUModel
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_profile import used_bytes

CACHE_SHARE = 0.1
"""Part of the free memory that is used for the larger of the two KV caches, which is several GiB on
a card."""
_SMALLER = 8
"""The larger cache has so many times the blocks of the smaller one."""
MAX_TIME_RATIO = 1.5
"""Maximum ratio of the times of a decode with the larger cache and a decode with the smaller cache.
A step that touched the whole cache would take up to eight times as long."""


@dataclass(frozen=True)
class _Launched:
    """Time and memory of a decode over a cache of one size."""

    cache_bytes: int
    seconds: float
    launch_bytes: int
    """Memory while the layer ran, in addition to the memory that was in use before."""
    trouble: tuple[str, ...]
    """Host fallbacks and copies of tensors, in words."""


Prepare = Callable[[HabanaBridge, HPUModel, VllmConfig, Tensor, PaddedShape], Execution]
"""Returns an object that runs the packed decode of this shape."""


def check_eager(bridge: HabanaBridge, model: str) -> Outcome:
    """Check a decode that runs as separate operators. In lazy mode they are recorded until
    `mark_step`.
    """
    return _check_decode(bridge, model, lambda bridge, model, *_: Execution(bridge, model))


def check_compiled(bridge: HabanaBridge, model: str) -> Outcome:
    """Check a decode with `torch.compile`."""
    if bridge.is_lazy:
        return Outcome("skip", "torch.compile needs eager mode (PT_HPU_LAZY_MODE=0)")
    return _check_decode(bridge, model, prepare_compiled)


def check_graph(bridge: HabanaBridge, model: str) -> Outcome:
    """Check a decode with an HPU graph that is replayed."""
    if not bridge.is_lazy:
        return Outcome("skip", "HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1)")
    return _check_decode(bridge, model, prepare_graph)


def prepare_compiled(
    bridge: HabanaBridge, model: HPUModel, config: VllmConfig, *_: object
) -> Execution:
    """Return the execution with which the engine runs decodes in eager mode."""
    execution = CompiledExecution(bridge, model, config)
    execution.allow_shapes(4)
    return execution


def prepare_graph(
    bridge: HabanaBridge, model: HPUModel, config: VllmConfig, packed: Tensor, shape: PaddedShape
) -> Execution:
    """Return the execution with which the engine runs decodes in lazy mode."""
    execution = GraphExecution(bridge, model, config.hpu.hidden_layers_per_graph)
    execution.capture(packed, shape)
    return execution


def check_context(bridge: HabanaBridge, model: str) -> Outcome:
    """Check a prefill of requests that already have tokens in the cache."""
    config = config_of(model)
    comparison = Comparison()
    with unsupported_is_skipped() as skipped:
        rig = LayerTestHarness(
            bridge, config, num_blocks_of(bridge, config, CACHE_SHARE / _SMALLER)
        )
        want = rig.reference()
        rig.prefill(np.zeros(len(SEQ_LENS), np.int32), np.array(CONTEXT_LENS, np.int32))
        starts, ends = np.array(CONTEXT_LENS, np.int32), np.array(SEQ_LENS, np.int32) - 1
        run = partial(rig.prefill, starts, ends)
        got = run().cpu()
        comparison.add_time("a prefill", shortest_s(bridge, run), MAX_STEP_S)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            case = f"{end - start} tokens after {start}"
            comparison.add(case, got[row, : end - start], want[row][start:end])
    return skipped[0] if skipped else comparison.outcome(config.model.dtype_name)


def _check_decode(bridge: HabanaBridge, name: str, prepare: Prepare) -> Outcome:
    config = config_of(name)
    comparison = Comparison()
    with unsupported_is_skipped() as skipped:
        smaller = _launch(bridge, config, CACHE_SHARE / _SMALLER, prepare, comparison)
        larger = _launch(bridge, config, CACHE_SHARE, prepare, comparison)
    if skipped:
        return skipped[0]
    return _judge(comparison, smaller, larger, config.model.dtype_name)


def _judge(
    comparison: Comparison, smaller: _Launched, larger: _Launched, dtype_name: str
) -> Outcome:
    """Return the outcome of a decode check. Values are judged before times, because a wrong layer
    may be fast.
    """
    gib, mib = larger.cache_bytes / 2**30, larger.launch_bytes / 2**20
    values = comparison.outcome(dtype_name)
    if values.status == "fail":
        return values
    if larger.trouble:
        return Outcome("fail", "; ".join(larger.trouble))
    ratio = larger.seconds / smaller.seconds
    times = (
        f"{larger.seconds * 1e3:.2f} ms with a cache of {gib:.2f} GiB, "
        f"{smaller.seconds * 1e3:.2f} ms with 1/{_SMALLER} of it (ratio {ratio:.2f})"
    )
    if ratio > MAX_TIME_RATIO:
        return Outcome("fail", f"{times}, limit {MAX_TIME_RATIO}: the time depends on the cache")
    grown = larger.launch_bytes - smaller.launch_bytes
    if grown > larger.cache_bytes / 4:  # a copy of only the keys or the values takes half of it
        return Outcome(
            "fail",
            f"a forward pass took {mib:.1f} MiB in addition to the cache of {gib:.2f} GiB: "
            "the cache is copied",
        )
    return Outcome("pass", f"{values.detail}; {times}; {mib:.1f} MiB while it ran")


def _launch(
    bridge: HabanaBridge, config: VllmConfig, share: float, prepare: Prepare, comparison: Comparison
) -> _Launched:
    rig = LayerTestHarness(bridge, config, num_blocks_of(bridge, config, share))
    rig.prefill_all()
    packed, shape = rig.pack_decode()
    before, used = bridge.counters(), used_bytes(bridge)
    bridge.reset_peak()
    with rig.operators():
        run = partial(prepare(bridge, rig.model, config, packed, shape).run, packed, shape)
        hidden_states = run()[1].cpu()
        seconds = shortest_s(bridge, run)
    for row, want in enumerate(rig.reference()):
        case = f"sequence {row}, {SEQ_LENS[row]} tokens, cache of {rig.num_blocks} blocks"
        comparison.add(case, hidden_states[row], want[-1])
    launch_bytes = bridge.peak_bytes() - used
    trouble = tuple(error_between(before, bridge.counters()))
    return _Launched(rig.cache_bytes, seconds, launch_bytes, trouble)


def error_between(before: DeviceCounters, after: DeviceCounters) -> Iterator[str]:
    """Describe the host fallbacks, and the copies of a whole cache, between two counter
    readings.
    """
    new = {
        name: count - before.cpu_fallbacks.get(name, 0)
        for name, count in after.cpu_fallbacks.items()
    }
    if listed := ", ".join(f"{name} ({count})" for name, count in sorted(new.items()) if count):
        yield f"ran on the host: {listed}"
    copies = (after.cache_copies or 0) - (before.cache_copies or 0)
    if copies:
        mib = ((after.copied_bytes or 0) - (before.copied_bytes or 0)) / 2**20
        yield f"{copies} copies of a whole cache tensor, {mib:.1f} MiB"
