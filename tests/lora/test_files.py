"""Test what is read from adapter_config.json, without a model."""

import json

import pytest

from vllm.errors import RequestError
from vllm.lora.files import check_files


@pytest.mark.parametrize(
    ("values", "rank", "scale"),
    [
        ({}, 8, 1.0),  # the defaults of peft
        ({"r": 16.0, "lora_alpha": 32}, 16, 2.0),
        ({"lora_alpha": 4.0}, 8, 0.5),
        ({"rank_pattern": {"q_proj": 4.0}, "lora_alpha": 8}, 4, 2.0),
        ({"rank_pattern": None, "alpha_pattern": {"q_proj": 16}}, 8, 2.0),
    ],
)
def test_absent_keys_and_whole_floats_are_those_of_peft(values, rank, scale, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    config = check_files(tmp_path, 64)
    found = config.rank_of("model.layers.0.self_attn.q_proj")
    assert (repr(found), config.scale_of("model.layers.0.self_attn.q_proj", found)) == (
        repr(rank),
        scale,
    )


@pytest.mark.parametrize("values", [{"r": 8.5}, {"rank_pattern": {"q_proj": 0.0}}, {"r": None}])
def test_a_rank_that_is_none_is_named(values, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(RequestError, match="must be an integer above 0"):
        check_files(tmp_path, 64)
