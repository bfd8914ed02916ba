"""Test models in the format of Mistral AI: params.json and consolidated*.safetensors."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.reference import (
    SHORT_TEXTS,
    TransformersReference,
    assert_all_greedy,
    random_prompts,
)
from tests.tiny_models import make_tiny_model
from tests.transformers_utils.test_tekken import NUM_SPECIAL, WORDS, write_tekken
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.errors import ConfigError, WeightLoadError

MAX_TOKENS = 5
NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "lm_head.": "output.",
    "model.norm.": "norm.",
    "model.layers.": "layers.",
    "self_attn.": "attention.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.": "feed_forward.",
    "mlp.": "feed_forward.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    **{f"{part}_proj": f"w{part}" for part in "qkvo"},
}


def as_published(dense: Path, target: Path) -> Path:
    """Write the given model in Mistral's format, with the tokenizer of the bundled model."""
    target.mkdir()
    config = json.loads((dense / "config.json").read_text())
    heads = {"wq": config["num_attention_heads"], "wk": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        for theirs, native in NAMES.items():
            name = name.replace(theirs, native)
        for part, count in heads.items():
            if f".{part}." in name:  # rotary embedding rotates neighboring elements of these heads
                size, columns = tensor.shape[0] // count, tensor.shape[1]
                halves = tensor.view(count, 2, size // 2, columns)
                tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
        tensors[name] = tensor
    save_file(tensors, target / "consolidated.safetensors")
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads["wq"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": heads["wq"],
        "n_kv_heads": heads["wk"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"]
        if "rope_parameters" in config
        else config["rope_theta"],
        "sliding_window": config["sliding_window"],
    }
    if "num_local_experts" in config:
        names = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
        params["moe"] = {key: config[name] for key, name in names.items()}
    (target / "params.json").write_text(json.dumps(params))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, target)
    return target


@pytest.mark.parametrize(("family", "load_format"), [("mistral", "mistral"), ("mixtral", "auto")])
def test_tokens_are_those_of_transformers(family, load_format, tmp_path):
    dense = make_tiny_model(family, tmp_path / "dense")
    folder = as_published(dense, tmp_path / "published")
    prompts = random_prompts(8, 64 - MAX_TOKENS, vocab_size=4096)
    llm = LLM(str(folder), load_format=load_format, **SHORT_TEXTS)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_all_greedy(outputs, prompts, params, TransformersReference(dense))
    assert all(output.outputs[0].text for output in outputs)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral")
    return as_published(make_tiny_model("mistral", folder / "dense"), folder / "published")


def test_a_folder_with_a_config_may_be_read_in_that_format(published, tmp_path):
    """Repositories of Mistral AI often contain both formats."""
    folder = shutil.copytree(published, tmp_path / "both")
    shutil.copy(published.parent / "dense" / "config.json", folder)
    alone = shutil.copytree(folder, tmp_path / "alone")
    (alone / "params.json").unlink()
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    tokens = [
        LLM(str(each), load_format="mistral", **SHORT_TEXTS)
        .generate(prompt, params, use_tqdm=False)[0]
        .outputs[0]
        .token_ids
        for each in (published, folder, alone)
    ]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dim": None}, "has no 'dim'. Download the file again"),
        ({"n_heads": 2**40}, "'num_attention_heads' must be an integer from 1 to 65536"),
        ({"vision_encoder": {}}, "has 'vision_encoder', which this engine cannot read from this"),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3"}},
            "has 'quantization', which this engine cannot read",
        ),
    ],
)
def test_params_that_cannot_be_read_are_named(params, message, published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "damaged")
    known = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps(known | params))
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **SHORT_TEXTS)


@pytest.fixture(scope="module")
def with_tekken(published, tmp_path_factory):
    """Write the model with tekken.json as its only tokenizer."""
    folder = shutil.copytree(published, tmp_path_factory.mktemp("tekken") / "model")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return write_tekken(folder, "v7")


def test_a_chat_is_tokenised_by_tekken_json(with_tekken):
    llm = LLM(str(with_tekken), **SHORT_TEXTS)
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "a"}]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    output = llm.chat(messages, params, use_tqdm=False)[0]
    the, a = NUM_SPECIAL + 256 + WORDS.index("the"), NUM_SPECIAL + ord("a")
    assert output.prompt_token_ids == [1, 17, the, 18, 3, a, 4]
    tokenizer = llm.get_tokenizer()
    assert output.outputs[0].text == tokenizer.decode(
        output.outputs[0].token_ids, skip_special_tokens=True
    )


def test_what_is_missing_is_named(published, with_tekken, tmp_path):
    without_tokenizer = shutil.copytree(with_tekken, tmp_path / "tokenizer.model")
    (without_tokenizer / "tekken.json").rename(without_tokenizer / "tokenizer.model.v3")
    with pytest.raises(
        ConfigError, match=r"tokenizer\.model\.v3 cannot be read without tokenizer\.json\. Save"
    ):
        LLM(str(without_tokenizer), **SHORT_TEXTS)
    without_weights = shutil.copytree(published, tmp_path / "empty")
    (without_weights / "consolidated.safetensors").unlink()
    with pytest.raises(WeightLoadError, match=r"no file there is named consolidated\*\.safetensor"):
        LLM(str(without_weights), load_format="mistral", **SHORT_TEXTS)
