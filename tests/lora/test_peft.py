"""Adapters that peft has made and saved, against peft's own outputs, merged and not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lora_files import greedy
from tests.reference_model import load_reference
from tests.tiny_models import ALL_FAMILIES, make_tiny_model
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
"""Of peft, which warns of what it corrects."""

NUM_TOKENS = 6
PROMPT = [(7 * i * i + 3) % 3000 + 16 for i in range(21)]
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2},
    "rsLoRA of rank 16": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "some of rank 64": {"r": 4, "rank_pattern": {"layers.1": 64, r"h\.1": 64}},
    "rank 256": {"r": 256, "lora_alpha": 128},
}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
OTHER_TARGETS: dict[str, dict[str, Any]] = {
    "opt_post_norm": {"exclude_modules": ["project_in", "project_out"]},
    # peft has all experts of a layer as one parameter.
    **{family: {"target_modules": _ATTENTION} for family in ("mixtral", "qwen3_moe", "olmoe")},
    **{
        family: {"target_modules": _LATENT}
        for family in ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
    },
    **{family: {"target_modules": ["in_proj"]} for family in ("mamba", "mamba2")},
}
"""Where not every linear layer of a family can have one."""
FAMILIES = [family for family in ALL_FAMILIES if family != "llama4"]  # which peft cannot run
OFTEN = ("llama", "phi3", "gpt2", "falcon_40b", "mixtral", "deepseek_v2", "mamba")


def save(family: str, model: Path, folder: Path, seed: int, options: dict[str, Any]) -> list[Any]:
    """Tokens and log-probabilities of peft, with the adapter beside the weights and merged."""
    torch.manual_seed(seed)
    targets = {"target_modules": "all-linear"} | OTHER_TARGETS.get(family, {})
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **targets, **options)
    adapted = peft.get_peft_model(load_reference(model), config).eval()
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.data *= 0.3 / options["r"] ** 0.5
    adapted.save_pretrained(folder)
    beside = greedy(adapted, PROMPT, NUM_TOKENS)
    return [beside, greedy(adapted.merge_and_unload(), PROMPT, NUM_TOKENS)]


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in OFTEN else pytest.mark.exhaustive) for f in FAMILIES],
)
def test_outputs_are_those_of_peft(family, tmp_path):
    model = make_tiny_model(family, tmp_path / "model")
    wanted, adapters = [], []
    for number, (name, options) in enumerate(ADAPTERS.items(), 1):
        folder = tmp_path / str(number)
        wanted.append(save(family, model, folder, number, options))
        adapters.append(LoRARequest(name, number, str(folder)))
    llm = LLM(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        num_gpu_blocks_override=32,
        enable_lora=True,
        max_loras=4,
        max_lora_rank=256,
    )
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": PROMPT}] * 4, params, use_tqdm=False, lora_request=adapters
    )
    for output, references in zip(outputs, wanted, strict=True):
        sample = output.outputs[0]
        found = [row[i].logprob for i, row in zip(sample.token_ids, sample.logprobs, strict=True)]
        for ids, logprobs in references:
            assert list(sample.token_ids) == ids, output.lora_request
            assert found == pytest.approx(logprobs, abs=3e-4)
