"""Test adapters that peft has made and saved against peft's own outputs, merged and not merged."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lora_files import greedy, merged_model, write_expert_adapter
from tests.reference_model import load_reference
from tests.tiny_models import ALL_FAMILIES, make_tiny_model
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.transformers_utils.transformers_version import is_version_4

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
_LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
_DELTA_NET = [*_ATTENTION, *(f"in_proj_{part}" for part in ("qkvz", "ba", "qkv", "z", "b", "a"))]
_DELTA_NET += ["out_proj"]
OTHER_TARGETS: dict[str, dict[str, Any]] = {
    # peft stores all experts of a layer as one parameter.
    **{
        family: {"target_modules": _ATTENTION}
        for family in ("mixtral", "qwen3_moe", "olmoe", "minimax_m2", "flex_olmo", "phimoe")
    },
    **{
        family: {"target_modules": _LATENT}
        for family in (
            *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32"),
            *("glm4_moe_lite", "glm_moe_dsa", "longcat_flash"),
        )
    },
    # No gate_proj and up_proj: peft doubles their rank, as if each expert had one matrix for both.
    **{
        family: {"target_modules": [*_ATTENTION, "down_proj"]}
        for family in ("dots1", "glm4_moe", "ernie4_5_moe", "hunyuan_moe", "solar_open")
    },
    "kimi_linear": {
        "target_modules": [*_LATENT, "k_proj", "v_proj", "b_proj", "f_a_proj", "g_b_proj"]
    },
    **{family: {"target_modules": _DELTA_NET} for family in ("qwen3_next", "qwen3_5_moe")},
    # peft refuses the other layers of these families.
    **{
        family: {"target_modules": ["in_proj", "x_proj", "dt_proj"]}
        for family in ("mamba", "falcon_mamba")
    },
    "mamba2": {"target_modules": ["in_proj"]},
    **{
        family: {"target_modules": ["in_proj", *_ATTENTION, "gate_proj", "up_proj", "down_proj"]}
        for family in ("falcon_h1", "falcon_h1_norms", "nemotron_h")
    },
    "zamba2": {"target_modules": ["in_proj", "linear"]},  # several layers share the other modules
    "nemotron_h_latent": {"target_modules": ["in_proj", "fc1_latent_proj", "fc2_latent_proj"]},
}
"""Families in which some linear layers cannot have an adapter."""
ONLY_MERGED = ("mamba", "falcon_mamba", "jamba")
"""transformers takes the weight out of dt_proj, past the adapter that peft has added to it."""
FAMILIES = [family for family in ALL_FAMILIES if family != "llama4"]  # peft cannot run this family
OFTEN = ("llama", "opt_post_norm", "phi3", "gpt2", "falcon_40b", "mixtral", "deepseek_v2", "mamba")


def save(
    family: str,
    model: Path,
    folder: Path,
    seed: int,
    options: dict[str, Any],
    targets: dict[str, Any] | None = None,
    size: float = 0.3,
) -> list[Any]:
    """Save an adapter. Return tokens and log-probabilities of peft with the adapter separate from
    the weights, and merged.
    """
    torch.manual_seed(seed)
    chosen = targets or {"target_modules": "all-linear"} | OTHER_TARGETS.get(family, {})
    chosen = chosen | options
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **chosen)
    adapted = peft.get_peft_model(load_reference(model), config).eval()
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name or ".lora_embedding_" in name:
            parameter.data *= size / options["r"] ** 0.5
        if ".modules_to_save." in name or ".trainable_tokens_delta." in name:
            parameter.data += torch.randn(parameter.shape) * size / 3
    adapted.save_pretrained(folder)
    beside = greedy(adapted, PROMPT, NUM_TOKENS)
    if targets:  # merging would also change the weight that is tied to this one
        return [beside]
    merged = greedy(adapted.merge_and_unload(), PROMPT, NUM_TOKENS)
    return [merged] if family in ONLY_MERGED else [beside, merged]


@pytest.mark.parametrize(
    ("family", "module"), [("gpt2", "c_attn"), ("falcon_40b", "query_key_value")]
)
def test_patterns_match_the_names_of_the_file(family, module, tmp_path):
    model = make_tiny_model(family, tmp_path / "model")
    patterns = {"rank_pattern": {module: 8}, "alpha_pattern": {rf"1\..*{module}": 64}}
    options = {"r": 4, "lora_alpha": 4, **patterns}
    wanted = [save(family, model, tmp_path / "1", 1, options)]
    assert_outputs(model, [LoRARequest("patterns", 1, str(tmp_path / "1"))], wanted)


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
    assert_outputs(model, adapters, wanted)


def assert_outputs(
    model: Path, adapters: list[LoRARequest], wanted: list[list[Any]], **engine: Any
) -> None:
    """Check the outputs of all adapters in one batch, with requests without an adapter first and
    last.
    """
    llm = LLM(
        str(model),
        **{
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 64,
            "num_gpu_blocks_override": 32,
            "enable_lora": True,
            "max_loras": 4,
            "max_lora_rank": 256,
            **engine,
        },
    )
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0,
        logprobs=0,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    mixed = [None, *adapters, None]
    prompts = [{"prompt_token_ids": PROMPT}] * len(mixed)
    first, *outputs, last = llm.generate(prompts, params, use_tqdm=False, lora_request=mixed)
    assert first.outputs[0].token_ids == last.outputs[0].token_ids
    for output, references in zip(outputs, wanted, strict=True):
        sample = output.outputs[0]
        found = [row[i].logprob for i, row in zip(sample.token_ids, sample.logprobs, strict=True)]
        for ids, logprobs in references:
            assert list(sample.token_ids) == ids, output.lora_request
            assert found == pytest.approx(logprobs, abs=3e-4)
        assert of_prompt(output) != pytest.approx(of_prompt(first), abs=1e-2)


def of_prompt(output) -> list[float]:
    """Return the log-probabilities of the prompt's tokens."""
    rows = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
    return [row[token].logprob for token, row in rows]


NAMES = {
    "gpt2": ("wte", "c_attn"),
    "gpt_neox": ("embed_in", "dense"),
    "opt": ("embed_tokens", "fc1"),
}
"""Of the input embedding and of a linear layer, where they are not embed_tokens and q_proj."""


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox", "opt"])
def test_embeddings_and_heads_are_those_of_peft(family, tmp_path):
    """In gpt2 and opt the head is tied to the embedding, and peft adapts each separately."""
    model = make_tiny_model(family, tmp_path / "model")
    head = "embed_out" if family == "gpt_neox" and is_version_4() else "lm_head"
    table, linear = NAMES.get(family, ("embed_tokens", "q_proj"))
    wanted, adapters = [], []
    for number, targets in enumerate(([table], [head], [table, linear, head]), 1):
        folder = tmp_path / str(number)
        options = {"r": 2 * number, "lora_alpha": 8}
        chosen = {"target_modules": targets}
        wanted.append(save(family, model, folder, number, options, chosen))
        adapters.append(LoRARequest("+".join(targets), number, str(folder)))
    assert_outputs(model, adapters, wanted)


OF_TABLES: list[dict[str, Any]] = [
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "embed_tokens"]},
    {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    {"trainable_token_indices": [*PROMPT[3:9], 7]},
    {"trainable_token_indices": {"lm_head": [5, PROMPT[1]], "embed_tokens": PROMPT[2:4]}},
]
"""Trained rows of the input embedding and of the output head."""


@pytest.mark.parametrize(
    ("family", "cases"), [("qwen3", OF_TABLES), ("llama", [OF_TABLES[1], OF_TABLES[4]])]
)
def test_trained_tables_are_those_of_peft(family, cases, tmp_path):
    """In qwen3 the head is tied to the embedding."""
    model = make_tiny_model(family, tmp_path / "model")
    wanted, adapters = [], []
    for number, targets in enumerate(cases, 1):
        folder = tmp_path / str(number)
        chosen = {"target_modules": ["q_proj"]} | targets
        wanted.append(save(family, model, folder, number, {"r": 2, "lora_alpha": 8}, chosen))
        adapters.append(LoRARequest(str(number), number, str(folder)))
    assert_outputs(model, adapters, wanted, max_loras=len(adapters))


OF_EXPERTS: list[dict[str, Any]] = [
    {
        "target_modules": _ATTENTION,
        "target_parameters": ["gate.weight", "experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 5},
    },
    {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]},
    {"target_modules": [], "target_parameters": ["experts.down_proj"]},
]
"""Parameters with the matrices of all experts of a layer, and with the router's."""
WITHOUT_GATES = ("nemotron_h",)
"""Families with the parameter `up_proj` instead of `gate_up_proj`."""
STACKED_IN_VERSION_4 = ("gpt_oss", "llama4")
"""Families in which transformers 4 has a parameter of all experts. In other families it has a
module for each expert, so peft finds no such parameter."""
ROUTERS = {
    "gpt_oss": ["router.weight"],
    "llama4": ["router.weight"],
    "granite_moe": [],  # the router is not a parameter of one matrix
    "deepseek_v2": [],  # the router is in float32
    "deepseek_v3": [],
    "nemotron_h": [],
}
"""Names of the router that differ from gate.weight in peft."""


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "qwen2_moe",
        # Its experts are stored as [in, out], with gates and ups alternately, and have biases.
        "gpt_oss",
        "llama4",  # its experts are stored as [in, out], but peft reads them as [out, in]
        *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("qwen3_moe", "olmoe")),
        *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("deepseek_v2", "deepseek_v3")),
        *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("granite_moe", "nemotron_h")),
    ],
)
def test_experts_are_those_of_peft(family, tmp_path):
    if is_version_4() and family not in STACKED_IN_VERSION_4:
        pytest.skip("this transformers has a module for each expert")
    model = make_tiny_model(family, tmp_path / "model")
    wanted, adapters = [], []
    for number, targets in enumerate(OF_EXPERTS, 1):
        folder = tmp_path / str(number)
        options = {"r": 3 * number, "lora_alpha": 8, "use_rslora": number == 2}
        names = [
            name
            for given in targets["target_parameters"]
            for name in (ROUTERS.get(family, [given]) if given == "gate.weight" else [given])
        ]
        if family in WITHOUT_GATES:
            names = [name.replace("gate_up", "up") for name in names]
        chosen = targets | {"target_parameters": names}
        if family.startswith("deepseek") and targets["target_modules"]:
            chosen |= {"target_modules": _LATENT}
        wanted.append(save(family, model, folder, number, options | chosen, size=3))
        adapters.append(LoRARequest(str(number), number, str(folder)))
    assert_outputs(model, adapters, wanted)


@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen2_moe", pytest.param("nemotron_h", marks=pytest.mark.exhaustive)],
)
def test_experts_that_are_stored_one_by_one_are_added(family, tmp_path):
    """peft saved adapters like this when transformers had a linear layer for each matrix of an
    expert. Of these families, today's peft can read only Mixtral's.
    """
    model = make_tiny_model(family, tmp_path / "model")
    folder = write_expert_adapter(tmp_path / "adapter", model, 5, 4, size=0.4)
    wanted = [greedy(merged_model(model, folder), PROMPT, NUM_TOKENS)]
    if family == "mixtral":
        reference = peft.PeftModel.from_pretrained(load_reference(model), folder).eval()
        wanted.append(greedy(reference, PROMPT, NUM_TOKENS))
    assert_outputs(model, [LoRARequest("one by one", 1, str(folder))], [wanted])
