"""Test values that a forward pass looks up once for all layers of its model."""

import torch
from torch import Tensor, nn

from tests.reach import replace_ops, run_prepared
from vllm.attention import LaunchContext
from vllm.attention.backends.sdpa import naive_sdpa
from vllm.config import RopeConfig
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.ops.native.operators import NativeOps
from vllm.worker.hpu.launches.model import LaunchModel, PreparedLaunch


class Layer(nn.Module):
    def __init__(self, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary_emb = rotary_emb

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        query, key = self.rotary_emb(positions, x, x * 0.5)
        return query + key


class TwoRopes(nn.Module):
    """Layers that alternate between two rotary tables."""

    def __init__(self) -> None:
        super().__init__()
        tables = [RotaryEmbedding(RopeConfig(theta=t, rotary_dim=8), 64) for t in (1e4, 1e6)]
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer(tables[index % 2]) for index in range(4))

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(token_ids)[:, None]
        for layer in self.layers:
            x = layer(positions, x)
        return x


def test_angles_are_looked_up_once_for_each_table_and_rotate_as_ever(monkeypatch):
    torch.manual_seed(0)
    looked_up = []

    class CountingOps(NativeOps):
        def rotary_angles(self, positions, cos_sin_cache, dtype, is_neox, sections=None):
            looked_up.append(cos_sin_cache)
            return super().rotary_angles(positions, cos_sin_cache, dtype, is_neox, sections)

    replace_ops(monkeypatch, CountingOps())
    model = TwoRopes()
    token_ids, positions = torch.tensor([3, 5, 7]), torch.tensor([0, 9, 40])
    want = model(token_ids, positions)
    assert len(looked_up) == len(model.layers)
    looked_up.clear()
    launch = LaunchModel(model, 16, naive_sdpa)
    prepared = PreparedLaunch(None, token_ids, positions, slots=torch.zeros_like(positions))
    assert torch.equal(run_prepared(launch, prepared, token_ids), want)
    tables = [layer.rotary_emb.cos_sin_cache for layer in model.layers[:2]]
    assert [id(x) for x in looked_up] == [id(x) for x in tables]
    # A forward pass without prepared tables, as on the CPU: each layer looks up its own table.
    with launch.launch_holder.running(LaunchContext(None, positions)):
        assert torch.equal(model(token_ids, positions), want)
