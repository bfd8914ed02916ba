"""Test attention in both directions: the prompts of a forward pass do not see each other."""

import itertools

import numpy as np
import pytest
import torch

from vllm.attention import EncoderAttention, LaunchContext, bind_prompt_caches, whole_prompts
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps


@pytest.fixture(params=[NativeOps, CPUOps], autouse=True)
def operators(request):
    before = get_ops()
    set_ops(request.param())
    yield
    set_ops(before)


def attend(lens, dtype):
    """Return queries, keys and values of random prompts, and a function that computes their
    attention in one forward pass.
    """
    torch.manual_seed(0)
    layer, num_tokens = EncoderAttention(2, 8), sum(lens)
    bind_prompt_caches(layer, num_tokens, len(lens), dtype)
    qkv = torch.randn(3, num_tokens, 2, 8).to(dtype)

    def run(q, k, v, counts):
        context = LaunchContext(whole_prompts(counts), torch.arange(sum(counts)))
        with layer.launch.running(context):
            return layer(q, k, v)

    return layer, qkv, run(*qkv, lens), run


@pytest.mark.parametrize("lens", [[1], [5, 5, 5], [3, 1, 40, 7, 8, 1, 39], list(range(1, 30))])
def test_a_launch_is_its_prompts_one_by_one(lens):
    layer, (q, k, v), got, _ = attend(lens, torch.float32)
    starts = np.concatenate([[0], np.cumsum(lens)])
    for first, last in itertools.pairwise(starts):
        part = slice(first, last)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part]) * layer.head_size**-0.5
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[part])
        torch.testing.assert_close(got[part], want)
        torch.testing.assert_close(layer(q[part], k[part], v[part]), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_prompt_do_not_depend_on_the_others(dtype):
    lens = [3, 1, 40, 7, 300, 17]
    _, qkv, got, run = attend(lens, dtype)
    for first, last in itertools.pairwise(np.concatenate([[0], np.cumsum(lens)])):
        alone = run(*qkv[:, first:last], [int(last - first)])
        assert torch.equal(got[first:last], alone)
