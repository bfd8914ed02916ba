"""Test GGUF files: metadata as a model folder, tokenizers, and files with wrong content."""

import json
import math
import shutil
import struct

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.tiny_models import make_tiny_model
from tests.tiny_pooling_models import make_pooling_model
from vllm.assets import BUNDLED_MODEL
from vllm.config import ModelArch, ModelConfig
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.rotary import rotary_frequencies
from vllm.transformers_utils.generation_config import load_generation_defaults
from vllm.transformers_utils.gguf.folder import unpack
from vllm.transformers_utils.gguf.header import read_header
from vllm.transformers_utils.gguf.model import GGUFModel, find_model, open_model
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files
from vllm.transformers_utils.hf_config import read_hf_config
from vllm.transformers_utils.hub import find_folder
from vllm.transformers_utils.sentence_transformers_config import read_sentence_transformers_config
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.transformers_utils.transformers_version import is_version_4

gguf = pytest.importorskip("gguf")

from tests.gguf_files import byte_level_metadata, word_piece_metadata, write_gguf  # noqa: E402

TEXTS = (
    "def read(path):\n    return open(path)  # 12345",
    "  Leading spaces,\ttabs, and don't: CAN'T",
    "Grüße, 世界! 🙂 émigré\r\n\r\nend ",
    "<|user|>hi<|end|>",
    "",
)


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    return write_gguf(BUNDLED_MODEL, tmp_path_factory.mktemp("gguf"))


def test_a_file_becomes_a_folder_that_says_what_the_model_says(bundled):
    folder = find_folder(str(bundled))
    got, want = (read_hf_config(path, {}) for path in (folder, BUNDLED_MODEL))
    for key in want.keys() - {"rope_theta", "attention_dropout", "initializer_range", "use_cache"}:
        expected = "float32" if key == "torch_dtype" else want[key]
        assert got["dtype" if key == "torch_dtype" else key] == pytest.approx(expected), key
    assert got["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    ends = json.loads((folder / "generation_config.json").read_text())
    assert ends == {"eos_token_id": [1, 6]}  # the ids of </s> and <|end|>
    assert (folder / "model.gguf").samefile(bundled)
    assert find_folder(str(bundled)) == folder, "made once"
    assert find_folder(str(bundled.parent)) == folder, "a folder with a GGUF file only"


def test_a_byte_level_tokenizer_is_that_of_the_model(bundled):
    got, want = get_tokenizer(str(unpack(bundled))), get_tokenizer(str(BUNDLED_MODEL))
    for text in TEXTS:
        assert got.encode(text) == want.encode(text)
        ids = want.encode(text)
        assert got.decode(ids) == want.decode(ids)
    talk = [{"role": "user", "content": "Hello"}]
    chats = [t.apply_chat_template(talk, tokenize=False) for t in (got, want)]
    assert chats[0] == chats[1]
    assert (got.eos_token_id, got.bos_token_id) == (1, 0)


def test_all_chat_templates_of_a_file_are_read(tmp_path):
    others = {"tokenizer__chat_template__tool_use": "T", "tokenizer__chat_template__rag": "R"}
    path = write_gguf(BUNDLED_MODEL, tmp_path, tokenizer__chat_template="D", **others)
    tokenizer = get_tokenizer(str(unpack(path)))
    assert tokenizer.chat_template == {"default": "D", "tool_use": "T", "rag": "R"}
    assert tokenizer.get_chat_template(None, [{}]) == "T"


def test_the_end_of_a_part_of_an_answer_is_not_the_end_of_the_answer(tmp_path):
    tokens = byte_level_metadata(BUNDLED_MODEL)["tokenizer.ggml.tokens"]
    assert tokens[6] == "<|end|>"
    tokens[3:5] = ["<|return|>", "<|call|>"]
    folder = unpack(write_gguf(BUNDLED_MODEL, tmp_path, tokenizer__ggml__tokens=tokens))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 3, 4]


@pytest.mark.parametrize("kind", [1, 4])
def test_a_token_that_ends_an_answer_is_a_control_token(tmp_path, kind):
    metadata = byte_level_metadata(BUNDLED_MODEL)
    kinds = metadata["tokenizer.ggml.token_type"]
    kinds[6] = kind
    folder = unpack(write_gguf(BUNDLED_MODEL, tmp_path, tokenizer__ggml__token_type=kinds))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 6]
    tokenizer = get_tokenizer(str(folder))
    ids = tokenizer.encode("hi<|end|>", add_special_tokens=False)
    assert ids[-1] == 6 and tokenizer.decode(ids, skip_special_tokens=True) == "hi"


def test_a_linear_factor_may_have_its_first_name(tmp_path):
    folder = unpack(write_gguf(BUNDLED_MODEL, tmp_path, llama__rope__scale_linear=4.0))
    rope = read_hf_config(folder, {})["rope_parameters"]
    assert rope == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def make_pieces(prefix: bool) -> tuple[Tokenizer, dict]:
    """Return a SentencePiece tokenizer of the library tokenizers, and the same as metadata."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Replace(" ", "\u2581")]
    after = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.insert(0, normalizers.Prepend("\u2581"))
        after.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(after)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    text = (BUNDLED_MODEL / "README.md").read_text()
    made.train_from_iterator(text.splitlines(), trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # tokens of single bytes are not special tokens
    made = Tokenizer.from_str(json.dumps(data))
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [2, 3, 3, *[6] * 256]
    return made, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds + [1] * (len(tokens) - len(kinds)),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_by_their_scores(tmp_path, prefix):
    want, metadata = make_pieces(prefix)
    made = tokenizer_files(GGUFModel((tmp_path,), metadata, {}))
    got = Tokenizer.from_str(made["tokenizer.json"])
    for text in (*TEXTS, "Models are trained on the source of the library"):
        ids = want.encode(text).ids
        assert got.encode(text).ids == [1, *ids]
        assert got.encode(text, add_special_tokens=False).ids == ids
        assert got.decode(ids) == want.decode(ids)


def test_pieces_are_merged_as_the_metadata_lists_them(tmp_path):
    """Files of Gemma 4 have such metadata, in which one special token occurs twice."""
    want, metadata = make_pieces(prefix=False)
    del metadata["tokenizer.ggml.add_space_prefix"]
    data = json.loads(want.to_str())
    lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    metadata |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": lines}
    metadata["tokenizer.ggml.scores"] = [-1000.0]  # scores are not used
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<|image>", "<|image>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3]
    made = tokenizer_files(GGUFModel((tmp_path,), metadata, {}))
    got = Tokenizer.from_str(made["tokenizer.json"])
    for text in TEXTS:
        ids = want.encode(text).ids
        assert got.encode(text).ids == [1, *ids]
        assert got.decode(ids) == want.decode(ids)
    assert got.encode("<|image>").ids == [1, first]


def test_special_tokens_of_phi3_take_the_spaces_after_them(tmp_path):
    _, metadata = make_pieces(prefix=True)
    added = ("<|endoftext|>", "<|placeholder1|>", "<|user|>", "<|end|>")
    first = len(metadata["tokenizer.ggml.tokens"])
    for name, values in (("tokens", added), ("token_type", [3] * 4), ("scores", [0.0] * 4)):
        metadata[f"tokenizer.ggml.{name}"] += values
    files = tokenizer_files(GGUFModel((tmp_path,), metadata, {}))
    phi = Tokenizer.from_str(files["tokenizer.json"])
    ids = phi.encode("a", add_special_tokens=False).ids

    def ids_of(text):
        return phi.encode(text, add_special_tokens=False).ids

    assert ids_of("<|user|>\n a<|end|>\n<|user|>") == [first + 2, *ids, first + 3, first + 2]
    assert ids_of("<|endoftext|>\na") != [first, *ids]
    metadata["tokenizer.ggml.tokens"][first + 1] = "<|other|>"
    files = tokenizer_files(GGUFModel((tmp_path,), metadata, {}))
    other = Tokenizer.from_str(files["tokenizer.json"])
    assert len(other.encode("<|end|>\n").ids) > len(phi.encode("<|end|>\n").ids)


@pytest.mark.parametrize("is_cased", [False, True])
def test_word_pieces_are_those_of_bert(tmp_path, is_cased):
    want = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    want.normalizer = normalizers.BertNormalizer(lowercase=not is_cased, strip_accents=not is_cased)
    want.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    want.decoder = decoders.WordPiece()
    special = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    want.train_from_iterator((BUNDLED_MODEL / "README.md").read_text().splitlines(), trainer)
    want.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    want.save(str(tmp_path / "tokenizer.json"))
    metadata = word_piece_metadata(tmp_path)
    if is_cased:
        names = ("lowercase", "strip_accents")
        metadata |= {f"tokenizer.ggml.normalizer.{name}": False for name in names}
    files = tokenizer_files(GGUFModel((tmp_path,), metadata, {}))
    got = Tokenizer.from_str(files["tokenizer.json"])
    assert got.get_vocab() == want.get_vocab()
    for text in (*TEXTS, "Models ARE tráined on [unused0] tokens[MASK]"):
        first, second = got.encode(text), want.encode(text)
        assert first.ids == second.ids
        assert got.decode(first.ids) == want.decode(second.ids)
    first, second = (each.encode("a model", "a token") for each in (got, want))
    assert (first.ids, first.type_ids) == (second.ids, second.type_ids)
    names = json.loads(files["tokenizer_config.json"])
    assert (names["cls_token"], names["sep_token"]) == ("[CLS]", "[SEP]")


@pytest.mark.parametrize(
    ("changes", "pooling"),
    [({}, None), ({"bert__pooling_type": 1}, "MEAN"), ({"bert__pooling_type": 2}, "CLS"),
     ({"bert__pooling_type": 3}, "LAST"), ({"bert__pooling_type": 4}, None)],
)  # fmt: skip
def test_the_metadata_says_how_texts_are_pooled(tmp_path, changes, pooling):
    source = make_pooling_model("BertModel", tmp_path / "source")
    found = read_sentence_transformers_config(unpack(write_gguf(source, tmp_path, **changes)))
    assert (found and found.pooling_type) == pooling
    assert found is None or found.normalize


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bert__pooling_type": 9}, r"pooling_type' is 9; supported: 0 \(none\), 1 \(mean\)"),
        ({"bert__block_count": 3}, r"lacks the tensors of model\.encoder\.layer\.2\."),
        ({"bert__block_count": 1 << 30}, "block_count' is 1073741824, but the file has"),
        (
            {"bert__feed_forward_length": 64},
            r"intermediate\.dense\.bias .* has the shape \[96\], .* \[64\]",
        ),
        ({"bert__context_length": 1 << 30}, r"position_embeddings.* has the shape \[128, 64\]"),
    ],
)
def test_metadata_that_contradicts_an_encoder_is_refused(tmp_path, changes, message):
    source = make_pooling_model("BertModel", tmp_path / "source")
    path = write_gguf(source, tmp_path, **changes)
    with pytest.raises(WeightLoadError, match=message) as failure:
        unpack(path)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'll add 1234", ["I", "'ll", " add", " 1234"]),
        ("llama-bpe", "I'LL add 1234\n\n", ["I", "'LL", " add", " ", "123", "4", "\n\n"]),
        ("qwen2", "I'll add 12\n", ["I", "'ll", " add", " ", "1", "2", "\n"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("smollm", "add 12", ["add", " ", "1", "2"]),
        ("default", "a `b` 12345", ["a", " `", "b", "`", " ", "123", "45"]),
        ("falcon", "a `b` 12345", ["a", " ", "`", "b", "`", " ", "123", "45"]),
        ("deepseek-coder", "ab\n 12,世界", ["ab", "\n", " ", "1", "2", ",", "世界"]),
        ("deepseek-llm", "Añ\n ;12世界 ", ["A", "ñ", "\n", " ;", "1", "2", "世界", " "]),
        ("deepseek-v3", "_ab 1234世界カ", ["_ab", " ", "123", "4", "世界カ"]),
        ("qwen35", "हिन्दी 12", ["हिन्दी", " ", "1", "2"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("falcon3", "add 1234", ["add", " ", "123", "4"]),
        ("smaug-bpe", "add 1234", ["add", " ", "123", "4"]),
        ("megrez", "add 12", ["add", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("kimi-k2", "word世界Word", ["word", "世界", "Word"]),
        ("bloom", "so, 12 (a)", ["so", ",", " 12", " (", "a", ")"]),
        ("viking", "so 12", ["so", " ", "1", "2"]),
        ("seed-coder", "a!\n12", ["a", "!", "\n", "1", "2"]),
        ("stablelm2", "a!\n12", ["a", "!\n", "1", "2"]),
        ("superbpe", "so many 12345", ["so many ", "12", "345"]),
    ],
)
def test_words_are_split_as_the_metadata_says(tmp_path, pre, text, words):
    metadata = byte_level_metadata(BUNDLED_MODEL) | {"tokenizer.ggml.pre": pre}
    made = tokenizer_files(GGUFModel((tmp_path,), metadata, {}))
    splitter = Tokenizer.from_str(made["tokenizer.json"]).pre_tokenizer
    got = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
    assert got == words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__pre": "of-mars"}, r"'of-mars', .*original model with --tokenizer"),
        ({"tokenizer__ggml__model": "t5"}, "model' is 't5'; supported: gpt2, llama, gemma4, bert"),
        (
            {"tokenizer__ggml__model": "llama"},
            r"ggml\.scores' must be a list of float with a value for each of the \d+ tokens",
        ),
        ({"tokenizer__ggml__token_type": [1, 2]}, "a value for each of the 4096 tokens"),
        ({"tokenizer__ggml__merges": ["a b c"]}, "must be a list of strings, each of two tokens"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_named_when_it_is_needed(tmp_path, changes, message):
    path = write_gguf(BUNDLED_MODEL, tmp_path, **changes)
    folder = unpack(path)  # no error yet, since --tokenizer may name another tokenizer
    with pytest.raises(ConfigError, match=message) as failure:
        get_tokenizer(str(folder))
    assert "Name one with tokenizer=" in str(failure.value)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("nomic-bert", "No other format of this model is supported either: use an embedding model"),
        ("jina-bert-v2", "No other format .*: use an embedding model that is a BERT"),
        ("refact", "No other format .*: use another model for code"),
        ("gemma4", "Use the safetensors checkpoint of the model$"),
    ],
)
def test_what_to_use_instead_of_an_unsupported_architecture_is_said(
    tmp_path, architecture, message
):
    path = write_gguf(BUNDLED_MODEL, tmp_path, general__architecture=architecture)
    with pytest.raises(ConfigError, match=f"architecture '{architecture}', which .*{message}"):
        unpack(path)


def test_a_missing_rule_for_words_is_logged_whenever_the_file_is_opened(tmp_path, caplog):
    path = write_gguf(BUNDLED_MODEL, tmp_path, tokenizer__ggml__pre=None)
    with caplog.at_level("WARNING", "vllm"):
        folder = unpack(path)
    assert "has no metadata 'tokenizer.ggml.pre'" in caplog.text
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = tokenizer.pre_tokenizer.pre_tokenize_str("a`b 12345")
    assert [end for _, (_, end) in words] == [1, 2, 3, 4, 7, 9]


HUGE = 1 << 60


def at(data: bytes, place: int, layout: str, value: int) -> bytes:
    packed = struct.pack(layout, value)
    return data[:place] + packed + data[place + len(packed) :]


def tensor_field(data: bytes, name: bytes, skip: int, layout: str, value: int) -> bytes:
    """Replace a number `skip` bytes after the name of a tensor."""
    return at(data, data.rindex(struct.pack("<Q", len(name)) + name) + 8 + len(name) + skip,
              layout, value)  # fmt: skip


EMBEDDING = b"token_embd.weight"


def with_list(count: int, kind: int = 0, item_bytes: int = 1) -> bytes:
    """Write a file whose only metadata is a list with this many zeros (type 8: texts)."""
    key = b"tokenizer.ggml.tokens"
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key
    return head + struct.pack("<IIQ", 9, kind, count) + bytes(count * item_bytes)


LIES = {
    "empty": (lambda d: b"", "it is empty"),
    "another file": (lambda d: b"PK\3\4" + d, "does not begin with GGUF"),
    "version": (lambda d: at(d, 4, "<I", 1), "has version 1 of GGUF"),
    "big endian": (lambda d: at(d, 4, ">I", 3), "has version 50331648 of GGUF"),
    "tensors": (lambda d: at(d, 8, "<Q", HUGE), f"announces {HUGE} tensors"),
    "one tensor too many": (lambda d: at(d, 8, "<Q", 58), "damaged"),
    "values": (lambda d: at(d, 16, "<Q", HUGE), f"announces {HUGE} metadata values"),
    "a long list": (
        lambda d: with_list(3 << 20),
        "3145728 numbers .* at most 2097152 are accepted",
    ),
    "many texts": (lambda d: with_list(3 << 20, 8, 8), "3145728 strings .* at most 2097152"),
    "name": (lambda d: at(d, 24, "<Q", HUGE), f"announces {HUGE} characters"),
    "header cut": (lambda d: d[:1000], "damaged"),
    "weights cut": (
        lambda d: d[:-100_000],
        r"is at the bytes \d+ to \d+, but the file has only \d+",
    ),
    "dimensions": (lambda d: tensor_field(d, EMBEDDING, 0, "<I", 9), "to 4 dimensions, got 9"),
    "size": (lambda d: tensor_field(d, EMBEDDING, 4, "<Q", HUGE), "is at the bytes"),
    "not downloaded": (
        lambda d: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "is a pointer of Git LFS, .* `git lfs pull`",
    ),
    "no rows": (lambda d: tensor_field(d, EMBEDDING, 12, "<Q", 0), r"may be 0, got \[0, 256\]"),
    "type": (lambda d: tensor_field(d, EMBEDDING, 20, "<I", 40), r"type NVFP4, .* supported: F32"),
    "unknown type": (lambda d: tensor_field(d, EMBEDDING, 20, "<I", 999), "has the type 999"),
    "offset": (lambda d: tensor_field(d, EMBEDDING, 24, "<Q", 1 << 50), "is at the bytes"),
    "crooked offset": (lambda d: tensor_field(d, EMBEDDING, 24, "<Q", 7), "is at the bytes"),
}


def _scaled(**values):
    return {f"llama__rope__scaling__{name}": value for name, value in values.items()}


_YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 1024}


@pytest.mark.skipif(is_version_4(), reason="this transformers reads other keys of rotations")
@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ({}, {}),
        ({"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}, {"beta_fast": 16.0, "beta_slow": 2.0}),
        ({"attn_factor": 0.5}, {"attention_factor": 0.5 * (1 + 0.1 * math.log(4))}),
        ({"attn_factor": 2.0, "yarn_attn_factor": 1.5}, {"attention_factor": 3.416}),
        ({"yarn_ext_factor": -1.0, "yarn_log_multiplier": 0.1}, {"mscale": 1, "mscale_all_dim": 1}),
        ({"attn_factor": 2.0, "yarn_log_multiplier": 0.1}, {"attention_factor": 2.0}),
    ],
)
def test_metadata_of_yarn_give_the_frequencies_of_transformers(tmp_path, metadata, want):
    folder = unpack(write_gguf(BUNDLED_MODEL, tmp_path, **_scaled(**_YARN, **metadata)))
    config = read_hf_config(folder, {})
    usual = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    hf = LlamaConfig(**{**config, "rope_parameters": {"rope_theta": 10000.0, **usual, **want}})
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](hf, torch.device("cpu"))
    rope = ModelArch.from_hf(config).rope
    got, got_factor = rotary_frequencies(rope, 4096)
    torch.testing.assert_close(got, frequencies)
    assert got_factor == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused_on_one_line(bundled, tmp_path, name):
    change, message = LIES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(change(bundled.read_bytes()))
    with pytest.raises(WeightLoadError, match=message) as failure:
        unpack(path)
    assert str(path) in str(failure.value) and "\n" not in str(failure.value)


def _experts(count: int, used: int) -> dict[str, int]:
    return {"llama__expert_count": count, "llama__expert_used_count": used}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": 1 << 30}, "block_count' is 1073741824, .* only 56 tensors"),
        ({"llama__block_count": 7}, r"lacks the tensors of model\.layers\.6\."),
        ({"llama__attention__head_count": -4}, r"head_count' must be a number above 0 .*got -4"),
        ({"llama__attention__head_count": None}, "head_count' must be a number"),
        ({"llama__attention__head_count": [8, 8, 4]}, "the same for all layers"),
        ({"llama__feed_forward_length": 1 << 30}, r"has the shape \[256, 688\], .*1073741824"),
        ({"llama__embedding_length": 1 << 40}, r"embedding_length' must be a number"),
        ({"llama__context_length": "long"}, "context_length' must be a number"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "has no metadata"),
        ({"llama__rope__scaling__type": "su"}, "supported: none, linear, yarn"),
        (_scaled(attn_factor=1.2), "attn_factor' is 1.2; without the type yarn it must be 1"),
        (_scaled(**_YARN, yarn_ext_factor=0.5), "yarn_ext_factor' is 0.5; supported: 1"),
        ({"llama__expert_count": 8}, "expert_used_count' must be a number above 0"),
        (_experts(8, 2), r"lacks the tensors of model\.layers\.0\.mlp\.experts\.7\.down_proj"),
        (_experts(2, 8), "expert_count' is 2, and 'llama.expert_used_count' 8"),
        (_experts(1 << 30, 2), "expert_count' is 1073741824, .* the file has 56 matrices"),
        ({"tokenizer__ggml__eos_token_id": 5000}, "is 5000, but the model has 4096 tokens"),
        ({"general__alignment": 7}, "damaged"),
        ({"split__count": 3}, "a part of a model in 3 files, but only 1 of them"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(tmp_path, changes, message):
    path = write_gguf(BUNDLED_MODEL, tmp_path, **changes)
    with pytest.raises(WeightLoadError, match=message) as failure:
        unpack(path)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 7}, r"gating_func' is 7; supported: 1 \(softmax\), 2 \(sigmoid\)"),
        ({"rope__dimension_count": 64}, "dimension_count' is 64, but a key has 40 elements"),
        ({"attention__kv_lora_rank": 1 << 30}, r"kv_a_\S+ .* has the shape"),
        ({"expert_shared_count": 3}, r"shared_experts.* has the shape \[64, 96\], .*\[64, 144\]"),
        ({"leading_dense_block_count": 0}, r"lacks the tensors of .*layers\.0\.mlp\.experts\.7"),
    ],
)
def test_metadata_that_contradicts_latent_attention_and_experts_is_refused(
    tmp_path, changes, message
):
    source = make_tiny_model("deepseek_v3", tmp_path / "source")
    changes = {f"deepseek2__{name}": value for name, value in changes.items()}
    with pytest.raises(WeightLoadError, match=message) as failure:
        unpack(write_gguf(source, tmp_path, **changes))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("metadata", "kinds"),
    [
        ({}, "sssf"),
        ({"sliding_window_pattern": 2}, "sfsf"),
        ({"sliding_window_pattern": [True, False, False, True]}, "sffs"),
        ({"sliding_window": None}, "ffff"),
    ],
)
def test_the_metadata_says_which_layers_have_windows(tmp_path, metadata, kinds):
    source = make_tiny_model("exaone4", tmp_path / "source")
    metadata = {f"exaone4__attention__{name}": value for name, value in metadata.items()}
    config = read_hf_config(unpack(write_gguf(source, tmp_path, **metadata)), {})
    assert "".join(kind[0] for kind in config["layer_types"]) == kinds


@pytest.mark.parametrize("pattern", [0, [True, False], [2, 2, 2, 2]])
def test_a_wrong_pattern_of_windows_is_refused(tmp_path, pattern):
    source = make_tiny_model("exaone4", tmp_path / "source")
    path = write_gguf(source, tmp_path, exaone4__attention__sliding_window_pattern=pattern)
    with pytest.raises(WeightLoadError, match=r"pattern' is .* a list of true and false for 4"):
        unpack(path)


@pytest.mark.parametrize("way", ["merged", "one by one"])
def test_experts_may_be_stored_in_other_ways(tmp_path, way):
    source = make_tiny_model("mixtral", tmp_path / "source")
    path = write_gguf(source, tmp_path, lambda name: gguf.GGMLQuantizationType.F16)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    for tensor in reader.tensors:
        data = tensor.data
        if not tensor.name.endswith("_exps.weight"):
            writer.add_tensor(tensor.name, data)
        elif way == "one by one":
            for number, matrix in enumerate(data):
                name = tensor.name.replace("_exps.", f".{number}.")
                writer.add_tensor(name, np.ascontiguousarray(matrix))
        elif "_gate_" in tensor.name:
            up = next(t for t in reader.tensors if t.name == tensor.name.replace("gate", "up"))
            both = np.concatenate([data, up.data], axis=1)
            writer.add_tensor(tensor.name.replace("gate", "gate_up"), both)
        elif "_down_" in tensor.name:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = open_model([path]).metadata
    models = [
        GGUFModel((each,), metadata, read_header(each).tensors)
        for each in (path, tmp_path / "other.gguf")
    ]
    want, found = (
        {name: (t.shape, _bytes_of(t)) for name, t in model.module_names().items()}
        for model in models
    )
    assert want == found and any(".experts.3.up_proj" in name for name in want)


def _bytes_of(tensor):
    count = int(np.prod(tensor.shape)) // tensor.type.block_size * tensor.type.block_bytes
    return np.fromfile(tensor.path, np.uint8, count, offset=tensor.start).tobytes()


def test_sampling_defaults_of_the_metadata_are_read(tmp_path):
    given = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat": 2}
    metadata = {f"general__sampling__{name}": value for name, value in given.items()}
    folder = unpack(write_gguf(BUNDLED_MODEL, tmp_path, **metadata))
    assert load_generation_defaults(ModelConfig(path=str(folder))) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "eos_token_ids": [1, 6],
    }


def test_layers_for_drafts_are_left_out(tmp_path):
    source = make_tiny_model("glm4_moe", tmp_path / "source")
    config = read_hf_config(unpack(write_gguf(source, tmp_path)), {})
    for name in ("mtp", "all"):
        (tmp_path / name).mkdir()
    path = write_gguf(source, tmp_path / "mtp", glm4moe__nextn_predict_layers=1)
    assert read_hf_config(unpack(path), {}) == {**config, "num_hidden_layers": 2}
    model = open_model([path])
    with pytest.raises(WeightLoadError, match=r"predict_layers' is 3, .*block_count' 3"):
        unpack(write_gguf(source, tmp_path / "all", glm4moe__nextn_predict_layers=3))
    assert not [name for name in model.module_names() if ".layers.2." in name]


@pytest.mark.parametrize(("half", "name"), [("k", "keys"), ("v", "values")])
def test_halves_of_latent_projections_belong_together(tmp_path, half, name):
    source = make_tiny_model("deepseek_v3", tmp_path / "source")
    path = write_gguf(source, tmp_path)
    stored = f"blk.1.attn_{half}_b.weight".encode()
    renamed = b"blk.9" + stored[len("blk.1") :]
    path.write_bytes(path.read_bytes().replace(stored, renamed))
    lacking = rf"lacks the tensors of .*layers\.1\.self_attn\.kv_b_proj\.{name}"
    with pytest.raises(WeightLoadError, match=lacking):
        unpack(path)


def test_an_architecture_without_experts_is_told_those_that_have_them(tmp_path):
    source = make_tiny_model("qwen2", tmp_path / "source")
    path = write_gguf(source, tmp_path, qwen2__expert_count=8)
    with pytest.raises(WeightLoadError, match="'qwen2'; supported for llama, qwen2moe"):
        unpack(path)


def test_other_architectures_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"architecture 'mamba', .*supported: llama, .*qwen2"):
        find_folder(str(tmp_path / "model.gguf"))


def test_of_several_models_in_a_folder_one_must_be_named(bundled, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(bundled, tmp_path / name)
    with pytest.raises(ConfigError, match=r"has 2 GGUF models \(a\.gguf, b\.gguf\); name one"):
        find_model(tmp_path)
    assert find_folder(str(tmp_path / "b.gguf")).name.startswith("b-")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "clip"}, "is the part of a model that reads images"),
        ({"general__type": "mmproj"}, "is the part of a model that reads images"),
        ({"general__type": "adapter"}, "is a LoRA adapter. Name the GGUF file of a model, and"),
        ({"general__type": "imatrix"}, "is a matrix of importances"),
    ],
)
def test_files_that_are_not_models_are_named_and_left_out(bundled, tmp_path, metadata, message):
    other = write_gguf(BUNDLED_MODEL, tmp_path, **metadata)
    with pytest.raises(ConfigError, match=message):
        unpack(other)
    model = shutil.copy(bundled, tmp_path / "the-model.gguf")
    assert find_model(tmp_path) == model


def test_a_file_may_have_another_suffix(bundled, tmp_path):
    """Ollama stores GGUF files under hashes, without the suffix .gguf."""
    path = shutil.copy(bundled, tmp_path / "sha256-0123")
    folder = find_folder(str(path))
    assert (folder / "sha256-0123.gguf").samefile(path)
    assert read_hf_config(folder, {}) == read_hf_config(unpack(bundled), {})


def test_a_changed_file_is_read_again(bundled, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(bundled, path)
    first = unpack(path)
    path.unlink()
    other = write_gguf(BUNDLED_MODEL, tmp_path, llama__context_length=1024)
    second = unpack(other)
    assert first != second
    assert read_hf_config(second, {})["max_position_embeddings"] == 1024
