"""Test that the tokenizer of a family loads without `AutoTokenizer` and is the same."""

import json
from pathlib import Path

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from tests.engine.tokenizers_for_tests import sentencepiece
from vllm.config.families import FAMILIES
from vllm.transformers_utils import tokenizer_class as module
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.transformers_utils.tokenizer_class import tokenizer_class

_CORPUS = ["the cat sat on the mat, and the hat was red", "import os, import sys: it's 12345"] * 20
_TEXTS = ["the cat sat", "  a mat  and \u00e9\U0001f642\n\thats.", "it 's <|user|> red</s> the", ""]
_BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_TOKENS = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<|endoftext|>", "<mask>"]


def _trained(backend: Tokenizer, trainer_class, special: list[str], **settings) -> Tokenizer:
    trainer = trainer_class(vocab_size=160, special_tokens=special, show_progress=False, **settings)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _byte_fallback() -> Tokenizer:
    backend = Tokenizer.from_str(sentencepiece().backend_tokenizer.to_str())
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    return backend


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _trained(backend, trainers.BpeTrainer, _TOKENS)


def _qwen() -> Tokenizer:
    backend = _byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def _word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _trained(backend, trainers.WordPieceTrainer, _BERT_TOKENS)


def _unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _trained(backend, trainers.UnigramTrainer, _TOKENS, unk_token="<unk>")


_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
_FAMILIES = {
    "llama-2": ("llama", "LlamaTokenizer", _byte_fallback, {**_LLAMA, "legacy": True}),
    "llama-fast": ("llama", "LlamaTokenizerFast", _byte_fallback, {**_LLAMA, "legacy": False}),
    "llama-eos": ("llama", "LlamaTokenizer", _byte_fallback, {**_LLAMA, "add_eos_token": True}),
    "llama-no-bos": ("llama", "LlamaTokenizer", _byte_fallback, {**_LLAMA, "add_bos_token": False}),
    "llama-3": ("llama", "PreTrainedTokenizerFast", _byte_level, _LLAMA),
    "llama-bytes": ("llama", "LlamaTokenizerFast", _byte_level, _LLAMA),
    "mistral": ("mistral", "LlamaTokenizer", _byte_fallback, _LLAMA),
    "mixtral": ("mixtral", "LlamaTokenizer", _byte_fallback, {**_LLAMA, "padding_side": "left"}),
    "phi-3": ("phi3", "LlamaTokenizerFast", _byte_fallback, _LLAMA),
    "gemma": ("gemma2", "GemmaTokenizerFast", _byte_fallback, {"bos_token": "<s>"}),
    "qwen2": ("qwen2", "Qwen2Tokenizer", _qwen, {"eos_token": "<|endoftext|>"}),
    "qwen2-generic": ("qwen2", "PreTrainedTokenizerFast", _qwen, {"eos_token": "</s>"}),
    "qwen3": ("qwen3_moe", "Qwen2Tokenizer", _qwen, {"eos_token": "<|endoftext|>"}),
    "qwen3_5": ("qwen3_5", "Qwen2Tokenizer", _qwen, {"eos_token": "<|endoftext|>"}),
    "gpt2": ("gpt2", "GPT2Tokenizer", _byte_level, _GPT2),
    "opt": ("opt", "GPT2Tokenizer", _byte_level, {**_LLAMA, "add_bos_token": True}),
    "granite": ("granite", "GPT2Tokenizer", _byte_level, _GPT2),
    "starcoder2": ("starcoder2", "GPT2Tokenizer", _byte_level, _GPT2),
    "gpt-neox": ("gpt_neox", "GPTNeoXTokenizerFast", _byte_level, _GPT2),
    "olmo2": ("olmo2", "GPT2Tokenizer", _byte_level, _GPT2),
    "bloom": ("bloom", "BloomTokenizerFast", _byte_level, _LLAMA),
    "falcon": ("falcon", "PreTrainedTokenizerFast", _byte_level, _GPT2),
    "cohere": ("cohere", "CohereTokenizerFast", _byte_level, {"eos_token": "</s>"}),
    "bert": ("bert", "BertTokenizer", _word_piece, {"do_lower_case": True}),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaTokenizer", _unigram, _LLAMA),
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_ids_text_and_settings_are_those_of_auto_tokenizer(tmp_path, family):
    model_type, name, make, settings = _FAMILIES[family]
    _write(tmp_path, make(), {"model_type": model_type}, {"tokenizer_class": name, **settings})
    assert tokenizer_class(tmp_path) is not None
    ours, theirs = get_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert _settings(ours) == _settings(theirs)
    for text in _TEXTS:
        ids = theirs(text).input_ids
        assert ours(text).input_ids == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
    messages = [{"role": "user", "content": "the mat"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "<|user|>the mat"


def _write(folder: Path, backend: Tokenizer, config: dict, settings: dict) -> None:
    backend.add_tokens(["<|user|>"])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    special = {key: value for key, value in settings.items() if key.endswith("_token")}
    special = {key: value for key, value in special.items() if isinstance(value, str)}
    for name, value in {
        "config.json": config,
        "tokenizer_config.json": {"chat_template": template, "model_max_length": 77, **settings},
        "special_tokens_map.json": {**special, "additional_special_tokens": ["<|user|>"]},
    }.items():
        (folder / name).write_text(json.dumps(value))


def _settings(tokenizer) -> dict:
    names = (
        "padding_side",
        "truncation_side",
        "model_max_length",
        "chat_template",
        "added_tokens_decoder",
    )
    names += (
        "clean_up_tokenization_spaces",
        "special_tokens_map",
        "all_special_ids",
        "bos_token_id",
    )
    return {name: getattr(tokenizer, name) for name in (*names, "eos_token_id", "vocab_size")}


def test_a_folder_that_transformers_5_has_written_is_read_by_every_release(tmp_path):
    _byte_level().save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<image>", "<a>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for model_type in ("llama", "unknown"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        tokenizer = get_tokenizer(str(tmp_path))
        assert {"<image>", "<a>"} <= set(tokenizer.all_special_tokens)
        ids = tokenizer("x<image>", add_special_tokens=False)["input_ids"]
        assert ids[-1] == tokenizer.convert_tokens_to_ids("<image>")


def test_the_table_is_that_of_the_installed_transformers():
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    if not hasattr(auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"):
        pytest.skip("the table is of transformers 5")
    with_classes = [family for family in FAMILIES.values() if family.tokenizer is not None]
    assert with_classes
    for family in with_classes:
        model_type, name = family.model_type, family.tokenizer
        theirs = auto.TOKENIZER_MAPPING_NAMES.get(model_type) or ""
        generic = theirs in ("TokenizersBackend", "MistralCommonBackend")
        assert name == (module.GENERIC if generic else theirs), model_type
        if name not in ("", module.GENERIC):
            is_forced = model_type in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
            assert is_forced == family.replaces_tokenizer, model_type


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"model_type": "llama"}, {"tokenizer_class": "NoSuchTokenizer"}),
        ({"model_type": "llama"}, {}),
        ({"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizer", "auto_map": {}}),
        ({"model_type": "llama", "auto_map": {}}, {"tokenizer_class": "LlamaTokenizer"}),
        ({"model_type": "unheard_of"}, {"tokenizer_class": "NoSuchTokenizer"}),
    ],
)
def test_what_is_in_doubt_is_left_to_auto_tokenizer(tmp_path, config, settings):
    _write(tmp_path, _byte_level(), config, settings)
    assert tokenizer_class(tmp_path) is None
