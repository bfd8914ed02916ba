"""Test the program of a model against `transformers` in float32.

An engine packs bfloat16 weights only, so no other test compares the two without rounding.
"""

import pytest
import torch

from tests.model_executor.helpers import make_config, prompt_of, reference_logits
from tests.model_executor.test_fusion import (
    Requests,
    attention_layers,
    bind_caches,
    run_fused,
    run_head,
)
from tests.tiny_models import ALL_FAMILIES, ROW_FAMILIES, WITHOUT_PROGRAM, sparing
from vllm.distributed import TPGroup
from vllm.model_executor.fusion import fuse, fuse_head
from vllm.model_executor.loader import load_model
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops.cpu.operators import load_cpu_kernels

pytestmark = [
    pytest.mark.usefixtures("cpu_ops"),
    pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built"),
]

FAMILIES = [
    family
    for family in ALL_FAMILIES
    # `tests.tiny_models.MORE_FAMILIES` says why phi3_long is left out.
    if family not in (*WITHOUT_PROGRAM, "phi3_long")
]
LAUNCHES = [23, 30, *[1] * 32]
"""New tokens of the one request: a prompt in two parts, then decodes."""


@torch.inference_mode()
@pytest.mark.parametrize("family", sparing(FAMILIES, ROW_FAMILIES))
def test_logits_of_the_program_are_those_of_transformers(tiny_model, family):
    folder = tiny_model(family)
    model = load_model(make_config(folder), TPGroup(), torch.device("cpu"), CPUPacked())
    for layer in attention_layers(model):
        bind_caches(layer, torch.float32)
    decoder = fuse(model)
    assert decoder is not None
    head = fuse_head(model, decoder)
    assert head is not None
    requests, input_ids = Requests(1), prompt_of(sum(LAUNCHES))
    found, start = [], 0
    for count in LAUNCHES:
        _, positions, metadata = requests.launch([count])
        launched = input_ids[start : start + count]
        found.append(run_head(head, run_fused(decoder, launched, positions, metadata)))
        start += count
    got, want = (x.log_softmax(-1) for x in (torch.cat(found), reference_logits(folder, input_ids)))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
