"""Test that the options of an attention layer reach the operators, with a cache and without."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.attention.options import split_options
from vllm.attention import Attention, LaunchContext, ReadsContext, share_context, text_positions
from vllm.attention.backends.alibi import alibi_slopes
from vllm.attention.backends.native_attn import RaggedMetadata
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps

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
    """Return the forward pass of tokens [begin, end) of the only request, whose blocks are in
    order."""
    return RaggedMetadata(
        num_decodes,
        torch.arange(begin, end),
        torch.arange(-(-LENGTH // BLOCK_SIZE)).int()[None],
        torch.tensor([end], dtype=torch.int32),
        np.array([0, end - begin], np.int32),
        np.array([end], np.int32),
    )


def attend_in_pieces(layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run two chunks of the prompt, then one token at a time. Return all results."""
    pieces = [(0, 0, 17), (0, 17, 40), *((1, i, i + 1) for i in range(40, LENGTH))]
    outputs = []
    for piece in pieces:
        rows = slice(*piece[1:])
        context = LaunchContext(launch(*piece), torch.arange(*piece[1:]))
        with layer.launch.running(context):
            outputs.append(layer(query[rows], key[rows], value[rows]))
    return torch.cat(outputs)


class TwoLayers(nn.Module):
    """Returns the contexts of the forward pass that its two layers read, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(1, 4, 1) for _ in range(2))

    def forward(self) -> list[LaunchContext | None]:
        return [layer.launch.context for layer in self.layers]


def test_engines_in_two_threads_do_not_read_each_others_launches():
    """One thread sets its forward pass as compiled code does, the other one with a context
    manager.
    """
    ours, theirs = TwoLayers(), TwoLayers()
    our_holder, their_holder = share_context(ours), share_context(theirs)
    our_launch, their_launch = (LaunchContext(None, torch.arange(n)) for n in (3, 4))
    is_set, is_read = Event(), Event()

    def compiled() -> list[LaunchContext | None]:
        our_holder.context = our_launch
        is_set.set()
        assert is_read.wait(60)
        return ours()

    with ThreadPoolExecutor(1) as pool:
        of_ours = pool.submit(compiled)
        assert is_set.wait(60)
        assert theirs() == [None, None]
        with their_holder.running(their_launch):
            assert all(context is their_launch for context in theirs())
        is_read.set()
        assert all(context is our_launch for context in of_ours.result())
    assert theirs() == [None, None]


def test_all_layers_of_a_model_read_one_holder_however_often_it_is_asked_for():
    model = TwoLayers()
    holder = share_context(model)
    assert share_context(nn.Sequential(model)) is holder
    assert {id(m.launch) for m in model.modules() if isinstance(m, ReadsContext)} == {id(holder)}


def test_a_launch_that_fails_leaves_no_context():
    layer = Attention(1, 4, 1)
    with (
        pytest.raises(RuntimeError, match="broken"),
        layer.launch.running(LaunchContext(None, torch.arange(1))),
    ):
        raise RuntimeError("broken")
    assert layer.launch.context is None


def test_positions_may_have_a_row_for_each_kind_of_position():
    positions = torch.arange(5)
    assert text_positions(positions) is positions
    assert torch.equal(text_positions(positions[None]), positions)
    with pytest.raises(
        ValueError,
        match=r"positions must have the shape .* for this layer, one per token, got \[3, 5\]",
    ):
        text_positions(positions.repeat(3, 1))


@pytest.mark.parametrize("option", OPTIONS)
def test_chunks_and_decodes_are_the_prompt_in_one_piece(ops, option):
    torch.manual_seed(0)
    options, tensors = split_options(OPTIONS[option])
    layer = Attention(6, 16, 2, options, **tensors)
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
    layer.set_cache_scales(scale, scale)
    got = attend_in_pieces(layer, query, key, value)
    stored = keys.float().flatten(0, 1)[:LENGTH] * scale
    # The allowed error is half of the distance between two numbers of this dtype.
    torch.testing.assert_close(stored, key, rtol=torch.finfo(dtype).eps / 2, atol=1e-3)
    torch.testing.assert_close(got, want, rtol=0, atol=0.2 if dtype == torch.float8_e4m3fn else 0.4)
