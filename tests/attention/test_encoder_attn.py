"""Attention in both directions: prompts of a launch do not see each other."""

import itertools

import numpy as np
import pytest
import torch

from vllm.attention import EncoderAttention, EncoderMetadata, LaunchContext
from vllm.attention.backends.encoder_attn import _ends


@pytest.mark.parametrize("lens", [[1], [5, 5, 5], [3, 1, 40, 7, 8, 1, 39], list(range(1, 30))])
def test_a_launch_is_its_prompts_one_by_one(lens):
    torch.manual_seed(0)
    layer, starts = EncoderAttention(2, 8), np.concatenate([[0], np.cumsum(lens)])
    q, k, v = torch.randn(3, sum(lens), 2, 8)
    metadata = EncoderMetadata.build(starts, torch.device("cpu"))
    with layer.launch.running(LaunchContext(metadata, torch.arange(sum(lens)))):
        got = layer(q, k, v)
    for first, last in itertools.pairwise(starts):
        part = slice(first, last)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part]) * layer.head_size**-0.5
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[part])
        torch.testing.assert_close(got[part], want)
        torch.testing.assert_close(layer(q[part], k[part], v[part]), want)


@pytest.mark.parametrize(
    ("lens", "ends"),
    [([4], [1]), ([3, 8, 9, 9, 100], [1, 4, 5]), ([5] * 10, [10]), ([1, 2, 3, 4], [1, 3, 4])],
)
def test_groups_have_little_padding(lens, ends):
    assert _ends(np.array(lens, np.int32)) == ends
