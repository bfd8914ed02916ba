"""Test every family in bfloat16: modules and programs are as close to float32 as `transformers` in
bfloat16.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model_executor.helpers import load, logits_of, make_config, prompt_of
from tests.model_executor.test_fusion import (
    Requests,
    attention_layers,
    bind_caches,
    run_fused,
    run_head,
)
from tests.reference_model import load_reference
from tests.tiny_models import (
    ALL_FAMILIES,
    RARE_FAMILIES,
    SIBLINGS,
    WITHOUT_PROGRAM,
    sparing,
)
from vllm.distributed import TPGroup
from vllm.model_executor.fusion import fuse, fuse_head
from vllm.model_executor.loader import load_model
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops.cpu.library import load_cpu_kernels

PROMPTS = torch.stack([prompt_of(100, seed) for seed in range(16)])
FEW = 4
"""Prompts that are tried first."""
LAUNCHES = (60, 34, *[1] * 6)
"""Tokens of a prompt that the program computes at once, as a prompt in two parts and decodes."""
MOST = 1.03
"""Times the error of transformers. Over 16 prompts the quotients of Gemma 3 and 4 are 0.94 to 0.99,
whichever prompts they are; over 4 prompts they are 0.90 to 1.06."""
WITH_PROGRAM = [family for family in ALL_FAMILIES if family not in WITHOUT_PROGRAM]
SPARED = (*RARE_FAMILIES, *SIBLINGS)
"""test_model_parity.py and test_program_parity.py compare these in float32."""


def error(logits: Tensor, want: Tensor) -> float:
    """Return the mean error of the log-probabilities over the vocabulary, for the median token.

    The median ignores tokens with a near tie of experts. They may choose another expert, and then
    their error is a hundred times larger.

    Args:
        logits: [..., vocab] of a run in bfloat16.
        want: log-probabilities, the same shape, float32.
    """
    return (logits.float().log_softmax(-1) - want).abs().mean(-1).median().item()


@cache
@torch.inference_mode()
def wanted(folder: Path, count: int) -> tuple[Tensor, float]:
    """Return the log-probabilities of transformers in float32 for the first prompts, and its error
    in bfloat16.
    """
    prompts = PROMPTS[:count]
    want = load_reference(folder)(prompts).logits.log_softmax(-1)
    return want, error(load_reference(folder, torch.bfloat16)(prompts).logits, want)


def quotient(folder: Path, run: Callable[[Tensor], Tensor]) -> float:
    """Return the error of a model as a part of the error of transformers.

    Few prompts are enough if it is below the limit, and otherwise all prompts decide.

    Args:
        folder: folder of the model.
        run: function from a prompt to logits in bfloat16, [T, vocab].
    """
    found: list[Tensor] = []
    for count in (FEW, len(PROMPTS)):
        want, most = wanted(folder, count)
        found += [run(prompt) for prompt in PROMPTS[len(found) : count]]
        measured = error(torch.stack(found), want) / most
        if measured <= MOST:
            break
    return measured


@pytest.mark.parametrize("family", sparing(ALL_FAMILIES, SPARED))
def test_modules_are_as_near_to_float32_as_transformers(tiny_model, family):
    model = load(tiny_model(family), dtype="bfloat16")

    def run(prompt: Tensor) -> Tensor:
        logits = logits_of(model, prompt)
        assert logits.dtype is torch.bfloat16
        return logits

    assert quotient(tiny_model(family), run) <= MOST


@torch.inference_mode()
@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize("family", sparing(WITH_PROGRAM, SPARED))
def test_programs_are_as_near_to_float32_as_transformers(tiny_model, family):
    config = make_config(tiny_model(family), "bfloat16")
    model = load_model(config, TPGroup(), torch.device("cpu"), CPUPacked())
    for layer in attention_layers(model):
        bind_caches(layer, torch.bfloat16)
    decoder = fuse(model)
    assert decoder is not None
    head = fuse_head(model, decoder)

    def run(prompt: Tensor) -> Tensor:
        requests, found = Requests(1), []
        for input_ids in prompt.split(LAUNCHES):
            _, positions, metadata = requests.launch([len(input_ids)])
            found.append(run_head(head, run_fused(decoder, input_ids, positions, metadata)))
        return torch.cat(found)

    assert quotient(tiny_model(family), run) <= MOST
