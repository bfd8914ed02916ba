"""Check a short run of decode steps: tokens per second, compared with the prediction of the cost
model.

The model is one decoder layer with embedding and head. The prediction counts the operators of the
same step on the host, and charges each with the published rates of the card (`vllm.cost_model`), as
if nothing were fused, plus its launch. The cost model was not measured on a card.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm.attention.backends.sdpa import torch_sdpa
from vllm.attention.cached_layer import layers_with_cache
from vllm.config import VllmConfig
from vllm.cost_model.cards import CARDS, CardSpec
from vllm.cost_model.constants import LAUNCH_STEP_S, REPLAY_GRAPH_S
from vllm.cost_model.work import work_of
from vllm.distributed import TPGroup
from vllm.hpu_check.check import Comparison, Outcome
from vllm.hpu_check.decoder_layer import CACHE_SHARE, error_between, prepare_compiled, prepare_graph
from vllm.hpu_check.layer_harness import (
    BLOCK_SIZE,
    SEQ_LENS,
    LayerTestHarness,
    bind,
    config_of,
    num_blocks_of,
    unsupported_is_skipped,
)
from vllm.hpu_check.stopwatch import elapsed_s
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM
from vllm.ops.native.operators import NativeOps
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.execution import Outputs
from vllm.worker.hpu.launches.model import HPUModel, regions_of

NUM_STEPS = 16
MAX_TIME_RATIO = 4.0
"""Maximum ratio of the time of a step to the predicted time. The prediction is rough; what is
slower by more than this waits for something that no step should wait for."""


def check_short_run(bridge: HabanaBridge, model: str) -> Outcome:
    """Check decode steps of a few requests, whose greedy tokens are read on the host after each
    step.
    """
    config = config_of(model)
    comparison = Comparison()
    with unsupported_is_skipped() as skipped:
        rig = LayerTestHarness(bridge, config, num_blocks_of(bridge, config, CACHE_SHARE / 8))
        rig.prefill_all()
        packed, shape = rig.pack_decode()
        prepare = prepare_graph if bridge.is_lazy else prepare_compiled
        before = bridge.counters()
        with rig.operators():
            run = partial(prepare(bridge, rig.model, config, packed, shape).run, packed, shape)
            hidden_states = run()[1].cpu()
            _greedy(run())
            seconds = elapsed_s(bridge, lambda: [_greedy(run()) for _ in range(NUM_STEPS)])
        trouble = tuple(error_between(before, bridge.counters()))
        for row, want in enumerate(rig.reference()):
            comparison.add(f"row {row}", hidden_states[row], want[-1])
        predicted_s = _predicted_step_s(bridge, rig, config)
    if skipped:
        return skipped[0]
    values = comparison.outcome()
    if values.status == "fail":
        return values
    if trouble:
        return Outcome("fail", "; ".join(trouble))
    return _judge(seconds / NUM_STEPS, predicted_s, bridge.device_name)


def _judge(step_s: float, predicted_s: float | None, card: str) -> Outcome:
    num_rows = len(SEQ_LENS)
    seen = f"{num_rows / step_s:.0f} tokens/s ({step_s * 1e3:.2f} ms a step of {num_rows} requests)"
    if predicted_s is None:
        return Outcome("pass", f"{seen}; the cost model does not know a {card}")
    predicted = f"the cost model predicts {num_rows / predicted_s:.0f} tokens/s"
    predicted += f" ({predicted_s * 1e3:.2f} ms)"
    if step_s > MAX_TIME_RATIO * predicted_s:
        return Outcome("fail", f"{seen}; {predicted}: more than {MAX_TIME_RATIO:.0f} times slower")
    return Outcome("pass", f"{seen}; {predicted}")


def _greedy(outputs: Outputs) -> Tensor:
    """Return the tokens of a step on the host. This waits for the card, as the engine does."""
    return outputs[0].argmax(-1).cpu()


class _Cost(TorchDispatchMode):
    """Adds up the predicted seconds of a card for the operators inside the context."""

    def __init__(self, spec: CardSpec) -> None:
        super().__init__()
        self._spec = spec
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.seconds += work_of(func, operands, results).seconds(self._spec)
        return result


def _predicted_step_s(
    bridge: HabanaBridge, rig: LayerTestHarness, config: VllmConfig
) -> float | None:
    """Return the predicted seconds of a step; None for a card without published rates."""
    names = [name for name in CARDS if bridge.device_name.lower().startswith(name)]
    if not names:
        return None
    host_model = load_model(config, TPGroup(), torch.device("cpu"))
    assert isinstance(host_model, CausalLM)
    host = SimpleNamespace(zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    bind(host, config, layers_with_cache(host_model), rig.num_used_blocks)
    model = HPUModel(host_model, BLOCK_SIZE, torch_sdpa)
    packed, shape = rig.host_decode(is_compact=True)
    cost = _Cost(CARDS[names[0]])
    with rig.operators(NativeOps()), model.launch_holder.running(None), cost:
        model(torch.from_numpy(packed), shape)
    if bridge.is_lazy:
        launches_s = REPLAY_GRAPH_S + LAUNCH_STEP_S  # one launch, and the launch of greedy sampling
    else:  # a launch of each compiled part, and about as many operators between them
        launches_s = 2 * len(regions_of(host_model)) * LAUNCH_STEP_S
    return cost.seconds + launches_s
