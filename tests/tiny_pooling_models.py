"""Tiny checkpoints of pooling models with fixed seeds, and the results of transformers for a
prompt.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from tests.kept_folders import kept
from tests.tiny_models import DECODER, LOAD_FLOAT32, VOCAB_SIZE, randomize

_BERT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_ROBERTA = _BERT | {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1}
QWEN = DECODER | {"num_labels": 3}

MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "BertModel": (transformers.BertConfig, _BERT),
    "BertForSequenceClassification": (transformers.BertConfig, _BERT | {"num_labels": 3}),
    "RobertaModel": (transformers.RobertaConfig, _ROBERTA),
    "RobertaForSequenceClassification": (transformers.RobertaConfig, _ROBERTA | {"num_labels": 1}),
    "XLMRobertaModel": (transformers.XLMRobertaConfig, _ROBERTA),
    "XLMRobertaForSequenceClassification": (
        transformers.XLMRobertaConfig,
        _ROBERTA | {"num_labels": 4},
    ),
    "LlamaModel": (transformers.LlamaConfig, DECODER),
    "MistralModel": (transformers.MistralConfig, DECODER | {"sliding_window": 16}),
    "Qwen2Model": (transformers.Qwen2Config, DECODER),
    "Qwen3Model": (transformers.Qwen3Config, DECODER | {"head_dim": 32}),
    "LlamaForSequenceClassification": (transformers.LlamaConfig, QWEN),
    "MistralForSequenceClassification": (transformers.MistralConfig, QWEN),
    "Qwen2ForSequenceClassification": (transformers.Qwen2Config, QWEN),
    "Qwen3ForSequenceClassification": (transformers.Qwen3Config, QWEN | {"head_dim": 32}),
    "Qwen2ForCausalLM": (transformers.Qwen2Config, DECODER),
}
"""Architecture -> transformers config."""

REWARD_MODELS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}
"""Architecture, which transformers does not have -> rewards per token."""


@kept
def make_pooling_model(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Write config.json and safetensors of a small random model; return the folder."""
    if architecture in REWARD_MODELS:
        return _make_reward_model(architecture, folder, REWARD_MODELS[architecture])
    create_config, values = MODELS[architecture]
    model = getattr(transformers, architecture)(create_config(**values | overrides))
    randomize(model, 0)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def _make_reward_model(architecture: str, folder: Path, num_rewards: int) -> Path:
    make_pooling_model("Qwen2ForCausalLM", folder)
    path = folder / "model.safetensors"
    size, generator = DECODER["hidden_size"], torch.Generator().manual_seed(1)
    shapes = {"0.weight": (size, size), "0.bias": (size,), "2.weight": (num_rewards, size)}
    shapes["2.bias"] = (num_rewards,)
    head = {f"score.{k}": torch.randn(v, generator=generator) * 0.2 for k, v in shapes.items()}
    save_file({**load_file(path), **head}, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return folder


def add_sentence_transformers_files(folder: Path, mode: str, *, normalize: bool = True) -> Path:
    """Write modules.json and the files that it names, with the pooling `pooling_mode_<mode>`;
    return the folder.
    """
    names = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" * (i > 0), "type": f"st.models.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", mode)}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    return folder


@cache
def _reference(folder: Path, architecture: str) -> Any:
    name = "Qwen2ForCausalLM" if architecture in REWARD_MODELS else architecture
    return getattr(transformers, name).from_pretrained(folder, **LOAD_FLOAT32).eval()


@torch.inference_mode()
def hidden_states(
    folder: Path, architecture: str, token_ids: Sequence[int], types: Sequence[int] | None = None
) -> Tensor:
    """Return the hidden states [T, hidden] of transformers, one prompt at a time."""
    model = _reference(folder, architecture)
    base = getattr(model, model.base_model_prefix, model)
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    states: Tensor = base(input_ids=torch.tensor([token_ids]), **given).last_hidden_state[0]
    return states


@torch.inference_mode()
def class_logits(
    folder: Path, architecture: str, token_ids: Sequence[int], types: Sequence[int] | None = None
) -> Tensor:
    """Return the logits [labels] of transformers."""
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    model = _reference(folder, architecture)
    logits: Tensor = model(input_ids=torch.tensor([token_ids]), **given).logits[0]
    return logits


@torch.inference_mode()
def rewards(folder: Path, architecture: str, token_ids: Sequence[int]) -> Tensor:
    """Return the rewards [T, rewards], computed by the formula of the head from hidden states of
    transformers.
    """
    tensors = load_file(folder / "model.safetensors")
    x = hidden_states(folder, architecture, token_ids)
    x = nn.functional.linear(x, tensors["score.0.weight"], tensors["score.0.bias"]).relu()
    return nn.functional.linear(x, tensors["score.2.weight"], tensors["score.2.bias"])


@torch.inference_mode()
def pair_logits(folder: Path, architecture: str, text: str, other: str) -> Tensor:
    """Return the logits [labels] of transformers for two texts, as the model's tokenizer joins
    them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    logits: Tensor = _reference(folder, architecture)(
        **tokenizer(text, other, return_tensors="pt")
    ).logits[0]
    return logits


def add_tokenizer(folder: Path, *, has_types: bool = True) -> Path:
    """Add a tokenizer of the words w5, w6, ..., with [CLS] and [SEP] around texts and token types
    for pairs.

    Args:
        folder: folder of the model.
        has_types: `model_input_names` contains the token types, as in BERT.
    """
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*names, *(f"w{i}" for i in range(len(names), VOCAB_SIZE))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", *["token_type_ids"] * has_types, "attention_mask"],
    ).save_pretrained(folder)
    return folder
