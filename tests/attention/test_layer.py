"""What an attention layer was made with reaches the operators, with a cache and without."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vllm.attention import Attention, LaunchMetadata, attention_metadata, current_metadata
from vllm.attention.backends.alibi import alibi_slopes
from vllm.attention.backends.native_attn import RaggedMetadata
from vllm.attention.backends.sdpa import torch_sdpa
from vllm.errors import ConfigError
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native import NativeOps
from vllm.worker.hpu.model import HPUModel

LENGTH, BLOCK_SIZE = 43, 16
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "alibi": {"alibi_slopes": alibi_slopes(6)},
    "soft cap": {"logits_soft_cap": 0.6},
    "all": {"sliding_window": 20, "alibi_slopes": alibi_slopes(6), "logits_soft_cap": 2.0},
}


@pytest.fixture(params=[NativeOps, CPUOps])
def ops(request: pytest.FixtureRequest):
    before = get_ops()
    set_ops(request.param())
    yield
    set_ops(before)


def launch(num_decodes: int, begin: int, end: int) -> RaggedMetadata:
    """Tokens [begin, end) of the only request, whose blocks are in order."""
    return RaggedMetadata(
        num_decodes,
        torch.arange(begin, end),
        torch.arange(-(-LENGTH // BLOCK_SIZE)).int()[None],
        torch.tensor([end], dtype=torch.int32),
        np.array([0, end - begin], np.int32),
        np.array([end], np.int32),
    )


def attend_in_pieces(layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A chunk, another chunk, then one token at a time."""
    pieces = [(0, 0, 17), (0, 17, 40), *((1, i, i + 1) for i in range(40, LENGTH))]
    outputs = []
    for piece in pieces:
        rows = slice(*piece[1:])
        with attention_metadata(launch(*piece)):
            outputs.append(layer(query[rows], key[rows], value[rows]))
    return torch.cat(outputs)


def test_a_forward_pass_of_another_thread_has_metadata_of_its_own():
    mine, other = launch(0, 0, 17), launch(0, 17, 40)

    def run() -> tuple[LaunchMetadata | None, ...]:
        before = current_metadata()
        with attention_metadata(other):
            is_entered.set()
            assert may_leave.wait(60)
            return before, current_metadata()

    is_entered, may_leave = Event(), Event()
    with ThreadPoolExecutor(1) as pool, attention_metadata(mine):
        found = pool.submit(run)
        assert is_entered.wait(60)
        assert current_metadata() is mine
        may_leave.set()
        assert found.result() == (None, other)
        assert current_metadata() is mine
    assert current_metadata() is None


@pytest.mark.parametrize("option", OPTIONS)
def test_chunks_and_decodes_are_the_prompt_in_one_piece(ops, option):
    torch.manual_seed(0)
    layer = Attention(6, 16, 2, **OPTIONS[option])
    query, key, value = torch.randn(LENGTH, 10, 16).split([6, 2, 2], dim=1)
    want = layer(query, key, value)
    caches = torch.full((2, 3, BLOCK_SIZE, 2, 16), float("nan"))
    layer.bind_kv_cache(*caches)
    got = attend_in_pieces(layer, query, key, value)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if option != "plain":
        plain = Attention(6, 16, 2)(query, key, value)
        assert (got - plain).abs().max() > 0.05


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_of_fp8_is_near_the_exact_one(ops, dtype, scale):
    torch.manual_seed(0)
    layer = Attention(6, 16, 2)
    query, key, value = torch.randn(LENGTH, 10, 16).split([6, 2, 2], dim=1)
    want = layer(query, key, value)
    keys, values = torch.zeros(2, 3, BLOCK_SIZE, 2, 16).to(dtype)
    layer.bind_kv_cache(keys, values)
    layer.key_scale = layer.value_scale = scale
    got = attend_in_pieces(layer, query, key, value)
    stored = keys.float().flatten(0, 1)[:LENGTH] * scale
    # Half a step: 3 or 2 bits after the first one.
    torch.testing.assert_close(stored, key, rtol=torch.finfo(dtype).eps / 2, atol=1e-3)
    torch.testing.assert_close(got, want, rtol=0, atol=0.2 if dtype == torch.float8_e4m3fn else 0.4)


class OneLayer(nn.Module):
    def __init__(self, layer: Attention) -> None:
        super().__init__()
        self.layer, self.weight = layer, nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("option", "message"), [("alibi", "has ALiBi"), ("soft cap", "has a soft cap of attention")]
)
def test_a_gaudi_refuses_what_it_would_compute_wrongly(option, message):
    model = OneLayer(Attention(6, 16, 2, **OPTIONS[option]))
    with pytest.raises(ConfigError, match=f"this model {message}.*run on cpu"):
        HPUModel(model, torch.zeros(2, dtype=torch.int32), 128, torch_sdpa)
