"""Test rotary embeddings at positions around 100,000: the logits are the ones of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.model_executor.helpers import make_config, prompt_of, read_arch, reference_of
from tests.tiny_models import make_tiny_model
from vllm.distributed import TPGroup
from vllm.model_executor.loader import load_model

LENGTH = 100_000
FACTORS = [1.0 + 0.3 * i for i in range(8)]
SHORT = 1_000
"""Length that a model was trained on."""
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"factor": 4.0}),
    "dynamic": ("llama", {"factor": 4.0}),
    "yarn": ("llama", {"factor": LENGTH / SHORT, "original_max_position_embeddings": SHORT}),
    "llama3": (
        "llama",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": SHORT,
        },
    ),
    "longrope": ("phi3", {"short_factor": FACTORS, "long_factor": [4 * f for f in FACTORS]}),
}


@pytest.mark.parametrize("kind", ROPES)
@torch.inference_mode()
def test_logits_at_position_100_000_are_those_of_transformers(kind, tmp_path):
    """The prompt begins at position 0 and continues at the end, so it sees near and far keys."""
    family, parameters = ROPES[kind]
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **parameters}
    is_stretched = kind in ("linear", "dynamic")
    values: dict[str, Any] = {"rope_parameters": rope, "num_hidden_layers": 2}
    if kind == "longrope":
        values["original_max_position_embeddings"] = SHORT
    folder = make_tiny_model(
        family,
        tmp_path,
        max_position_embeddings=LENGTH // 4 if is_stretched else LENGTH,
        **({} if family == "phi3" else {"head_dim": 16}),
        **values,
    )
    input_ids = prompt_of(60)
    positions = torch.cat((torch.arange(20), torch.arange(LENGTH - 40, LENGTH)))
    # Without a mask, transformers would treat the gap in the positions as the start of another
    # prompt.
    mask = torch.ones(1, 60, dtype=torch.long)
    arch = read_arch(folder).for_length(LENGTH)
    config = make_config(folder)
    config = replace(config, model=replace(config.model, arch=arch))
    model = load_model(config, TPGroup(), torch.device("cpu"))
    got = model.compute_logits(model(input_ids, positions))
    reference = reference_of(folder)
    want = reference(
        input_ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False
    ).logits[0]
    torch.testing.assert_close(got, want, atol=6e-5 * max(1, want.std().item()), rtol=0)
    near = model.compute_logits(model(input_ids, torch.arange(60)))
    assert (near - got)[-1].abs().max() > 0.01, "positions have no effect"
