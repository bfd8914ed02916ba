"""Test reading modules.json and the files that it names."""

import json

import pytest

from tests.tiny_pooling_models import add_sentence_transformers_files
from vllm.errors import ConfigError
from vllm.transformers_utils.sentence_transformers_config import (
    SentenceTransformersConfig,
    read_sentence_transformers_config,
)


def test_a_folder_without_modules_has_none(tmp_path):
    assert read_sentence_transformers_config(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "pooling_type"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "MEAN"),
        ({"pooling_mode_lasttoken": True}, "LAST"),
        ({"pooling_mode": "cls"}, "CLS"),
        ({"pooling_mode": ["mean"], "embedding_dimension": 8}, "MEAN"),
    ],
)
def test_both_spellings_of_the_mode_are_read(config, pooling_type, tmp_path):
    folder = add_sentence_transformers_files(tmp_path, "mean_tokens", normalize=False)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert read_sentence_transformers_config(folder) == SentenceTransformersConfig(
        pooling_type=pooling_type, normalize=False, max_seq_length=None
    )


def test_the_length_is_read(tmp_path):
    folder = add_sentence_transformers_files(tmp_path, "cls_token")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    found = read_sentence_transformers_config(folder)
    assert found is not None and (found.max_seq_length, found.normalize) == (256, True)


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"pooling_mode_max_tokens": True}, "max_tokens"),
        ({"pooling_mode": ["mean", "cls"]}, "'mean', 'cls'"),
        ({"pooling_mode": 3}, "3"),
        ({}, r"\[\]"),
    ],
)
def test_a_mode_that_is_not_there_is_named(config, shown, tmp_path):
    folder = add_sentence_transformers_files(tmp_path, "cls_token")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"pooling by .*{shown}.* is not supported"):
        read_sentence_transformers_config(folder)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([{"type": "a.Transformer"}, {"type": "a.Dense"}], "type Dense is not supported"),
        ([1], "type 1 is not supported"),
        ({}, "a JSON dict, not an array"),
        ([{"type": "a.Pooling", "path": "nowhere"}], "cannot read .*nowhere"),
    ],
)
def test_what_cannot_run_is_refused(modules, message, tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match=message):
        read_sentence_transformers_config(tmp_path)
