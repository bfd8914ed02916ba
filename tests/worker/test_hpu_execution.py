"""Test the ways to run a model on a card, with a minimal model."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from tests.hpu import simulated_hpu
from tests.worker.hpu_helpers import make_config
from vllm.attention import LaunchContext, share_context
from vllm.worker.hpu.launches.execution import Execution, LazyExecution, make_execution
from vllm.worker.hpu.launches.model import LaunchModel
from vllm.worker.hpu.memory.offload import choose_layers


class CountingBridge:
    """A bridge that only counts marks."""

    def __init__(self) -> None:
        self.num_marks = 0

    def mark_step(self) -> None:
        self.num_marks += 1


class Expert(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class ExpertLayer(nn.Module):
    """A layer with more experts than the model has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(20))
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


class ExpertModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Launches(nn.Module):
    """A minimal replacement for `LaunchModel`."""

    compile_regions = LaunchModel.compile_regions

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.launch_holder = share_context(model)

    def forward(self, packed: Tensor, shape: object) -> Tensor:
        self.launch_holder.context = LaunchContext(None, packed)
        return self.model(packed)


def test_a_mark_follows_every_few_layers_and_no_expert():
    bridge = CountingBridge()
    execution = LazyExecution(bridge, Launches(ExpertModel()), layers_per_mark=2)
    assert execution.run(torch.zeros(1), None).item() == 120
    assert bridge.num_marks == 3 + 1, "one more after the launch"


def test_layers_that_mark_steps_get_no_further_marks():
    bridge = CountingBridge()
    execution = LazyExecution(bridge, Launches(ExpertModel()), layers_per_mark=None)
    execution.run(torch.zeros(1), None)
    assert bridge.num_marks == 1, "after the launch"


def test_layers_and_no_experts_stay_on_the_host():
    model = ExpertModel()
    assert choose_layers(model, 1) == [model.layers[1], model.layers[4]]


def test_a_launch_that_fails_leaves_no_context():
    class Broken(ExpertModel):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    execution = Execution(CountingBridge(), Launches(Broken()))
    with pytest.raises(RuntimeError, match="out of memory"):
        execution.run(torch.zeros(1), None)
    assert execution.model.launch_holder.context is None


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Expert()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) * 2


def test_with_dynamic_shapes_a_recipe_is_still_made_for_each_size():
    with simulated_hpu(PT_HPU_LAZY_MODE=0) as bridge:
        x = [torch.zeros(n, 4).to("hpu") for n in (5, 6, 7)]
        with pytest.raises(BackendCompilerFailed, match="has symbolic sizes"):
            symbolic = torch.compile(lambda x: x + 1, backend="hpu_backend", dynamic=True)
            symbolic(x[0])
        torch._dynamo.reset()
        config = make_config(compile_dynamic_shapes=True, regional_compilation=False)
        execution = make_execution(bridge, Launches(Doubled()), config)
        before = bridge.counters().compilations
        for _ in range(2):
            assert [execution.run(each, None).cpu().sum().item() for each in x] == [40, 48, 56]
        assert bridge.counters().compilations == before + 3


@pytest.mark.parametrize("is_lazy", [True, False])
def test_in_lazy_mode_nothing_is_compiled_by_torch(is_lazy):
    def refuse(graph, inputs):
        raise RuntimeError("it was compiled")

    with simulated_hpu(PT_HPU_LAZY_MODE=is_lazy) as bridge:
        make_execution(bridge, Launches(Doubled()), make_config(hidden_layers_per_graph=1))
        compiled = torch.compile(lambda x: x + 1, backend=refuse)
        if is_lazy:
            assert compiled(torch.zeros(2)).tolist() == [1, 1]
        else:
            with pytest.raises(Exception, match="it was compiled"):
                compiled(torch.zeros(2))
    assert not torch._dynamo.config.disable
