"""Test cross-attention of tokens that see different items, against torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vllm.attention import LaunchContext, RaggedItems, SeenRun, share_context
from vllm.attention.cross import MAX_SINGLE
from vllm.distributed import TPGroup
from vllm.model_executor.layers.cross_attention import CrossAttention, slot_bytes
from vllm.model_executor.layers.norm import RMSNorm
from vllm.ops import get_ops, set_ops
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.cpu.operators.program import Program
from vllm.ops.cpu.operators.recorder import Recorder
from vllm.ops.item_slots import ItemSlots
from vllm.ops.native.operators import NativeOps

H, G, D, HIDDEN, STATE = 4, 2, 8, 32, 24
NUM_SLOTS = 64
NUM_TOKENS = 2 * MAX_SINGLE + 8
SLOTS = np.array([40, 3, 7, 8, 9, 20, 63], np.int32)
RUNS = (
    SeenRun(1, 3, SLOTS[2:]),
    SeenRun(4, 5, SLOTS[:1]),
    SeenRun(5, 7 + MAX_SINGLE, SLOTS),
    SeenRun(8 + MAX_SINGLE, 8 + 2 * MAX_SINGLE, SLOTS[:4]),
)


@pytest.fixture(params=["native", "cpu"])
def ops(request):
    if request.param == "cpu" and load_cpu_kernels() is None:
        pytest.skip("the kernels are not built")
    before = get_ops()
    set_ops(NativeOps() if request.param == "native" else CPUOps())
    yield
    set_ops(before)


def make_layer(dtype: torch.dtype, **options) -> CrossAttention:
    torch.manual_seed(0)
    layer = CrossAttention(HIDDEN, H, G, D, TPGroup(), state_size=STATE, **options).to(dtype)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.3)
    layer.bind_pool(*(torch.zeros(NUM_SLOTS, G, D, dtype=dtype) for _ in range(2)))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"qvo_bias": True}, {"head_norm": True}],
    ids=str,
)
@torch.inference_mode()
def test_tokens_read_what_torch_reads(ops, dtype, options):
    if "head_norm" in options:
        options = {"head_norm": lambda: RMSNorm(D, 1e-5)}
    layer = make_layer(dtype, **options)
    states, x = torch.randn(len(SLOTS), STATE).to(dtype), torch.randn(NUM_TOKENS, HIDDEN).to(dtype)
    layer.store(states, torch.from_numpy(SLOTS))
    assert not layer.is_read
    items = RaggedItems(NUM_TOKENS, RUNS)
    with share_context(layer).running(LaunchContext(None, torch.zeros(1, 0), items=items)):
        assert layer.is_read
        got, cleared = layer(x), layer.clear_unseeing(x)
    keys, values = layer.keys_values(states)
    query = layer.q_proj(x).view(-1, H, D)
    query = query if layer.q_norm is None else layer.q_norm(query)
    expected, sees = torch.zeros(NUM_TOKENS, H, D), torch.zeros(NUM_TOKENS, 1)
    place = {slot: index for index, slot in enumerate(SLOTS.tolist())}
    for run in RUNS:
        seen = [place[slot] for slot in run.slots.tolist()]
        k, v = (each[seen].repeat_interleave(H // G, 1).float() for each in (keys, values))
        q = query[run.begin : run.end].float()
        read = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)))
        expected[run.begin : run.end], sees[run.begin : run.end] = read.transpose(0, 1), 1
    close = {"atol": 0.1, "rtol": 0.1} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(got, layer.o_proj(expected.to(dtype).flatten(1)), **close)
    assert torch.equal(cleared, (x * sees).to(dtype))


@torch.inference_mode()
def test_a_run_has_the_same_bits_in_every_launch(ops):
    layer = make_layer(torch.float32)
    layer.store(torch.randn(len(SLOTS), STATE), torch.from_numpy(SLOTS))
    query = torch.randn(NUM_TOKENS, H, D)
    together = RaggedItems(NUM_TOKENS, RUNS).attend_to_items(layer, query)
    for run in RUNS:
        count = run.end - run.begin
        items = RaggedItems(count, (SeenRun(0, count, run.slots),))
        alone = items.attend_to_items(layer, query[run.begin : run.end])
        assert torch.equal(alone, together[run.begin : run.end])


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_a_program_reads_the_slots_of_each_token_and_refuses_others():
    pools = torch.randn(2, NUM_SLOTS, G, D)
    layer = SimpleNamespace(
        item_keys=pools[0], item_values=pools[1], item_options=AttentionOptions()
    )
    recorder = Recorder(torch.float32)
    given = recorder.given(H * D)
    read = recorder.attend_to_items(layer, given.unflatten(-1, (H, D)))
    program = Program(recorder, recorder.clear_unseeing(read.flatten(1)), given)

    def run(items):
        return program.forward(
            query.clone(),
            torch.zeros(1, NUM_TOKENS, dtype=torch.int64),
            torch.zeros(NUM_TOKENS, dtype=torch.int64),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([NUM_TOKENS], dtype=torch.int32),
            torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
            0,
            items=items,
        )

    query = torch.randn(NUM_TOKENS, H * D)
    items = RaggedItems(NUM_TOKENS, RUNS[:2])
    expected = items.attend_to_items(layer, query.view(-1, H, D))
    torch.testing.assert_close(run(items.by_token()), expected.flatten(1))
    assert not run(None).any()
    wrong = SeenRun(2, 3, np.array([NUM_SLOTS], np.int32))
    with pytest.raises(IndexError, match="token 2 refers to a slot"):
        run(RaggedItems(NUM_TOKENS, (wrong,)).by_token())
    with pytest.raises(
        ValueError, match=f"items must have one count for each of the {NUM_TOKENS} tokens, got 1"
    ):
        run(ItemSlots.empty(1))


def test_ranks_share_key_value_heads():
    layers = [
        CrossAttention(HIDDEN, H, G, D, TPGroup(rank, size))
        for rank, size in ((0, 1), (1, 2), (3, 4))
    ]
    assert [layer.num_kv_heads for layer in layers] == [2, 1, 1]
    assert slot_bytes(torch.nn.ModuleList(layers), torch.bfloat16) == 2 * 2 * D * (2 + 1 + 1)
