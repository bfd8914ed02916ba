"""Test sampling defaults and end tokens from generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm.config import ModelConfig
from vllm.errors import ConfigError
from vllm.transformers_utils.generation_config import load_generation_defaults

CONTENT = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "max_new_tokens": 100,
    "do_sample": False,
    "eos_token_id": [7, 8],
    "transformers_version": "4.50",
}
SAMPLING = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "max_tokens": 100,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", CONTENT)


def write(folder: Path, content: Any) -> Path:
    folder.mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def load(folder: Path, **settings: Any) -> dict[str, Any]:
    return load_generation_defaults(ModelConfig(path=str(folder), **settings))


def test_the_file_of_the_model_gives_the_defaults(folder):
    assert load(folder) == {**SAMPLING, "eos_token_ids": [7, 8]}


def test_without_a_file_there_are_no_defaults(tmp_path):
    assert load(tmp_path) == {"eos_token_ids": []}


def test_vllm_drops_sampling_defaults_and_keeps_end_tokens(folder):
    assert load(folder, generation_config="vllm") == {"eos_token_ids": [7, 8]}


def test_another_folder_replaces_the_defaults_of_the_model(folder, tmp_path):
    other = write(tmp_path / "other", {"temperature": 0.1})
    defaults = load(folder, generation_config=str(other))
    assert defaults == {"temperature": 0.1, "eos_token_ids": [7, 8]}


@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_overrides_come_on_top(folder, source):
    overrides = {"temperature": 0.2, "max_tokens": 5, "eos_token_id": 9}
    defaults = load(folder, generation_config=source, override_generation_config=overrides)
    base = SAMPLING if source == "auto" else {}
    assert defaults == {**base, "temperature": 0.2, "max_tokens": 5, "eos_token_ids": [9]}


def test_integers_may_be_written_as_floats(tmp_path):
    content = {"top_k": 20.0, "max_new_tokens": 5.0, "eos_token_id": [7.0, -1, 8]}
    expected = {"top_k": 20, "max_tokens": 5, "eos_token_ids": [7, 8]}
    assert repr(load(write(tmp_path / "model", content))) == repr(expected)


@pytest.mark.parametrize("value", [None, -1, [], -1.0, [-1]])
def test_a_model_may_have_no_end_token(tmp_path, value):
    folder = write(tmp_path / "model", {"eos_token_id": value})
    assert load(folder) == load(write(tmp_path / "other", {}))


def test_a_null_is_not_a_default(tmp_path):
    model = write(tmp_path / "model", {"temperature": None, "top_k": 5, "eos_token_id": None})
    assert load(model) == {"top_k": 5, "eos_token_ids": []}


def test_one_end_token_is_a_list_of_one(tmp_path):
    assert load(write(tmp_path / "model", {"eos_token_id": 2})) == {"eos_token_ids": [2]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"top_k": 5,}', "generation_config.json is not valid JSON: .* at line 1 column"),
        ("[]", "generation_config.json holds a JSON list, not an object"),
        ({"temperature": -1}, "temperature must be .*, got -1"),
        ({"top_k": "all"}, "top_k must be .*, got .all."),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id, .*, got '</s>'. Correct"),
        ({"eos_token_id": [None]}, r"eos_token_id must be .* null or -1 for none, got \[None\]"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path / "model", content))


def test_a_file_that_is_not_text_is_an_error(tmp_path):
    (tmp_path / "generation_config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(tmp_path)


def test_a_folder_without_the_file_is_an_error(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"that folder has no generation_config\.json"):
        load(folder, generation_config=str(tmp_path / "none"))


def test_a_misspelt_override_is_an_error(folder):
    with pytest.raises(ConfigError, match=r"'temprature' is not one of .*temperature"):
        load(folder, override_generation_config={"temprature": 1})


def test_an_override_of_what_changes_no_sampling_is_warned_of(folder, caplog):
    given = {"attn_temperature_tuning": True, "use_cache": True}
    assert load(folder, override_generation_config=given) == load(folder)
    assert [r.args[0] for r in caplog.records if "has no effect" in r.message] == [*given]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"do_sample": True, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": []}, None),
        (
            {"do_sample": False, "num_beams": 3},
            "do_sample=False (use temperature=0 in requests), num",
        ),
        (
            {"stop_strings": ["</s>"], "min_length": 4},
            "stop_strings=['</s>'] (use stop in requests), ",
        ),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
        ({"suppress_tokens": [1, 2]}, "suppress_tokens=[1, 2] (use logit_bias in requests)"),
        ({"suppress_tokens": [1, 3], "no_timestamps_token_id": 50363}, None),
        ({"bad_words_ids": [[n] for n in range(99)]}, "[10], [11... (use bad_words"),
    ],
)
def test_ignored_settings_are_named(content, expected, tmp_path, capsys):
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    load(tmp_path)
    said = capsys.readouterr().err
    assert ("that are ignored: " in said) == (expected is not None)
    assert expected is None or expected in said
    load(tmp_path, generation_config="vllm")
    assert not capsys.readouterr().err


def test_taken_defaults_are_logged_once(tmp_path, capsys):
    model = write(tmp_path / "model", {"temperature": 0.123, "eos_token_id": 1})
    load(model)
    load(model)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "] sampling defaults of the model: temperature=0.123 (generation_config='vllm' drops them)"
    )


@pytest.mark.parametrize(
    ("of_generation", "of_config", "expected"),
    [
        (None, [1, 107], [1, 107]),
        (None, 2, [2]),
        (None, None, []),
        (None, -1, []),
        ({}, [1, 107], [1, 107]),
        ({"eos_token_id": 1}, [1, 107], [1, 107]),
        ({"eos_token_id": [7, 8]}, 7, [7, 8]),
        ({"eos_token_id": [7, 8]}, [7, 9], [7, 8]),
    ],
)
def test_config_json_adds_end_tokens_that_the_other_file_lacks(
    of_generation, of_config, expected, tmp_path
):
    if of_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(of_generation))
    config = {"model_type": "llama"} | ({} if of_config is None else {"eos_token_id": of_config})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path) == {"eos_token_ids": expected}
    overrides = {"eos_token_id": 5}
    assert load(tmp_path, override_generation_config=overrides) == {"eos_token_ids": [5]}
