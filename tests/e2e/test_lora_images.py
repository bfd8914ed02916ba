"""Test adapters of the language part of a model with images: they give the tokens of merged
weights.
"""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.e2e.test_images import ENGINE, GREEDY, PROMPTS, images_of, requests_of, tokens_of
from tests.lora_files import merge
from tests.tiny_images import expected_outputs, make_tiny_images
from vllm import LLM
from vllm.errors import RequestError
from vllm.lora.request import LoRARequest

pytest.importorskip("PIL", reason="images need Pillow")

RANK = 4
MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
OLD_PREFIXES = ("model.language_model.", "language_model.model.")
"""Prefixes of the language part in transformers 5, and in version 4 before 4.52."""


def model_of(folder):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, architecture)
    return model_class.from_pretrained(folder, dtype=torch.float32)


def write_adapter(folder, model, part, rename=lambda name: name):
    """Write an adapter of the modules of one part of a model.

    Args:
        part: text in the names of the modules.
        rename: converts the name of a module to its name in the file.
    """
    folder.mkdir()
    rng, tensors = torch.Generator().manual_seed(5), {}
    for name, module in model.named_modules():
        if part not in name or not name.endswith(MODULES):
            continue
        outputs, inputs = module.weight.shape
        for letter, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = torch.randn(shape, generator=rng) * 0.1
            tensors[f"base_model.model.{rename(name)}.lora_{letter}.weight"] = values
    assert tensors
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest(folder.name, 1 + len(str(folder)), str(folder))


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_an_adapter_gives_the_tokens_of_merged_weights(family, tmp_path):
    folder = make_tiny_images(family, tmp_path / "base")
    model = model_of(folder)
    adapter = write_adapter(tmp_path / "new", model, "language_model")
    old = write_adapter(
        tmp_path / "old names", model, "language_model", lambda name: name.replace(*OLD_PREFIXES)
    )
    of_tower = write_adapter(tmp_path / "of the tower", model, "vision_tower")
    merged = tmp_path / "merged"
    shutil.copytree(folder, merged)
    merge(model, tmp_path / "new").save_pretrained(merged)
    llm = LLM(str(folder), **ENGINE | {"max_num_batched_tokens": 40}, enable_lora=True)
    prompts = requests_of(family)
    outputs = llm.generate(prompts, GREEDY, lora_request=adapter)
    given = [
        (output.prompt_token_ids, images_of(seeds))
        for output, (_, seeds) in zip(outputs, PROMPTS, strict=True)
    ]
    want = expected_outputs(merged, given, GREEDY.max_tokens)
    assert tokens_of(outputs) == want
    assert tokens_of(llm.generate(prompts, GREEDY, lora_request=old)) == want
    plain = tokens_of(llm.generate(prompts, GREEDY))
    assert plain == expected_outputs(folder, given, GREEDY.max_tokens)
    assert sum(one != other for one, other in zip(plain, want, strict=True)) >= 3
    mixed = [adapter, None] * 2 + [adapter]
    found = tokens_of(llm.generate(prompts, GREEDY, lora_request=mixed))
    assert found == [want[0], plain[1], want[2], plain[3], want[4]]
    with pytest.raises(RequestError, match="vision_tower"):
        llm.generate(prompts[0], GREEDY, lora_request=of_tower)
