"""Ways to run a model on a card, with a model that is next to nothing."""

import pytest
import torch
from torch import Tensor, nn

from vllm.attention import LaunchContext, share_context
from vllm.worker.hpu.execution import Execution, LazyExecution
from vllm.worker.hpu.offload import choose_layers


class CountingBridge:
    """Counts marks, in place of a card."""

    def __init__(self) -> None:
        self.num_marks = 0

    def mark_step(self) -> None:
        self.num_marks += 1


class Expert(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class ExpertLayer(nn.Module):
    """Has more experts than the model has layers."""

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
    """In the place of a `LaunchModel`."""

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
