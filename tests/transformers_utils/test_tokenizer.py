"""Test loading tokenizers from the available files, and one line of error if they are missing."""

import json
import shutil
from itertools import combinations
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.processing_utils import ProcessorMixin

import vllm
from vllm.errors import ConfigError
from vllm.transformers_utils.processor_template import template_of_folder
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.transformers_utils.transformers_version import is_version_4

BUNDLED_MODEL = Path(vllm.__file__).parent / "assets" / "models" / "stdlib-llama-5m"


@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_the_tokenizer_of_a_folder_is_loaded(mode):
    tokenizer = get_tokenizer(str(BUNDLED_MODEL), tokenizer_mode=mode)
    assert tokenizer.decode(tokenizer("import os")["input_ids"]) == "<s>import os"


PROCESSOR, LEGACY, JINJA = "processor_config.json", "chat_template.json", "chat_template.jinja"


@pytest.mark.parametrize(
    "names",
    [names for count in (1, 2, 3) for names in combinations((PROCESSOR, LEGACY, JINJA), count)],
)
def test_of_several_chat_templates_the_one_is_read_that_transformers_reads(names, tmp_path):
    for name in names:
        text = name if name == JINJA else json.dumps({"chat_template": name})
        (tmp_path / name).write_text(text)
    # A folder without a processor has the template of its tokenizer.
    own = JINJA if JINJA in names else "tokenizer_config.json"
    if PROCESSOR not in names:
        assert template_of_folder(tmp_path, own) == own
        assert template_of_folder(tmp_path, None) == (LEGACY if LEGACY in names else None)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    found = template_of_folder(tmp_path, own)
    assert found == names[0]
    if not is_version_4():
        assert found == ProcessorMixin.get_processor_dict(str(tmp_path))[0]["chat_template"]


def test_the_chat_template_of_a_processor_is_read(tmp_path):
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    (folder / PROCESSOR).write_text(json.dumps({"chat_template": "one"}))
    assert get_tokenizer(str(folder)).chat_template == "one"
    (folder / PROCESSOR).write_text("{")
    with pytest.raises(ConfigError, match=r"processor_config.json is not valid JSON"):
        get_tokenizer(str(folder))


def test_a_folder_without_a_tokenizer_is_named_with_what_to_do(tmp_path):
    shutil.copy(BUNDLED_MODEL / "config.json", tmp_path)
    with pytest.raises(ConfigError) as failure:
        get_tokenizer(str(tmp_path))
    message = str(failure.value)
    assert message.startswith(
        f"no usable tokenizer in {str(tmp_path)!r}: the folder has none of tokenizer.json,"
    )
    assert "skip_tokenizer_init" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("null", "holds a JSON NoneType, not an object"),
        ("[1]", "holds a JSON list, not an object"),
        ("", "is not valid JSON"),
        ('{"model": 5}', "tokenizer.json has no object 'model'"),
        ('{"model": {}}', "tokenizer.json has no list 'added_tokens'"),
        (
            '{"model": {"type": "New"}, "added_tokens": []}',
            "has a part that tokenizers .* does not know. Install a newer release: pip install -U",
        ),
        (
            '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [{}]}',
            "tokenizer.json cannot be read: missing field .*. Copy it again",
        ),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_folder(tmp_path, text, message):
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=f"no usable tokenizer .*{message}"):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("special_tokens_map.json", "", "special_tokens_map.json is not valid JSON"),
        ("added_tokens.json", "[]", "added_tokens.json holds a JSON list"),
        ("added_tokens.json", '{"<a>": "7"}', "must give an integer .*, got '7' for '<a>'"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": null}',
            "tokenizer_config.json has no object 'added_tokens_decoder'",
        ),
        ("tokenizer_config.json", '{"chat_template": 5}', "must be a text, or a list .*, got 5"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default"}]}',
            "a list of objects with name and template, got .{3}name",
        ),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "T5Tokenizer"}',
            "of the kind BPE, .*class in tokenizer_config.json: 'T5Tokenizer'. do not agree",
        ),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": "2048"}',
            "model_max_length in tokenizer_config.json must be a number, got '2048'",
        ),
    ],
)
def test_a_damaged_file_beside_the_vocabulary_is_named(tmp_path, name, text, message):
    if is_version_4() and "T5Tokenizer" in text:
        pytest.skip("this transformers does not compare them")
    for each in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED_MODEL / each, tmp_path / each)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"no usable tokenizer .*{message}"):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty. Copy it again"), (b"\n\x0e", "is damaged, or has another format .*again")],
)
def test_a_damaged_sentencepiece_file_is_named(tmp_path, monkeypatch, content, message):
    def fail(folder):
        raise RuntimeError("INTERNAL: [model_proto->ParseFromArray(serialized.data(), ")

    monkeypatch.setattr("vllm.transformers_utils.tokenizer.tokenizer_class", fail)
    monkeypatch.setattr("vllm.transformers_utils.tokenizer.find_spec", lambda name: True)
    shutil.copy(BUNDLED_MODEL / "config.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConfigError, match=f"no usable tokenizer .*tokenizer.model {message}"):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ((), "needs sentencepiece and protobuf, and sentencepiece and protobuf are not installed"),
        (
            ("sentencepiece",),
            "needs .*, and protobuf is not installed: pip install 'vllm.sentencepiece.'",
        ),
    ],
)
def test_packages_that_read_a_tokenizer_model_are_named(tmp_path, monkeypatch, installed, message):
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not read")
    monkeypatch.setattr(
        "vllm.transformers_utils.tokenizer.find_spec", lambda name: (name in installed) or None
    )
    with pytest.raises(ConfigError, match=f"no usable tokenizer .*tokenizer.model {message}"):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        ("llama", "PreTrainedTokenizerFast"),
        ("qwen3", "PreTrainedTokenizerFast"),
        ("qwen2", "PreTrainedTokenizerFast"),
        ("qwen2", "Qwen2Tokenizer"),
        ("llama", "GPT2Tokenizer"),
    ],
)
def test_the_tokenizer_is_the_one_that_transformers_chooses(tmp_path, model_type, tokenizer_class):
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    for name, change in {
        "config.json": {"model_type": model_type},
        "tokenizer_config.json": {"tokenizer_class": tokenizer_class},
    }.items():
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    ours, theirs = get_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    text = "def f(x):\n    return  [x]  # \u00e9<|end|>"
    assert ours(text).input_ids == theirs(text).input_ids
    messages = [{"role": "user", "content": "x"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
