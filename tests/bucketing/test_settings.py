import re
from dataclasses import fields

import pytest

from tests.bucketing.helpers import make_limits, make_settings
from vllm.bucketing.settings import (
    LINEAR_VARIABLES,
    BucketRange,
    BucketSettings,
    merge_prompts,
    usual_steps,
)
from vllm.envs import Envs
from vllm.errors import ConfigError

DEFAULT = re.compile(r"Default: ([^;]+)\.$")


def ranges(settings: BucketSettings) -> list[str]:
    found = (settings.prompt_bs, settings.prompt_seq, settings.decode_bs, settings.decode_block)
    return [str(r) for r in found]


@pytest.mark.parametrize(
    ("max_num_seqs", "block_size", "expected"),
    [
        (4, 128, ["[1, 4, 4]", "[128, 128, 1024]", "[1, 4, 4]", "[128, 128, 128]"]),
        (48, 128, ["[1, 32, 48]", "[128, 128, 1024]", "[1, 32, 48]", "[128, 128, 768]"]),
        (256, 128, ["[1, 32, 64]", "[128, 128, 1024]", "[1, 32, 256]", "[128, 128, 4096]"]),
        (256, 16, ["[1, 32, 64]", "[16, 16, 1024]", "[1, 32, 256]", "[16, 16, 32768]"]),
    ],
)
def test_defaults_are_the_documented_formulas(max_num_seqs, block_size, expected):
    limits = make_limits(max_num_seqs=max_num_seqs, block_size=block_size)
    assert ranges(BucketSettings.resolve(limits)) == expected


@pytest.mark.parametrize(("max_num_seqs", "block_size"), [(4, 128), (48, 128), (256, 16)])
def test_what_the_variables_say_of_their_defaults_is_true(max_num_seqs, block_size):
    settings = BucketSettings.resolve(make_limits(max_num_seqs=max_num_seqs, block_size=block_size))
    texts = {
        variable.name: DEFAULT.search(variable.metadata["help"])[1].replace("/", "//")
        for variable in fields(Envs)
        if variable.name in LINEAR_VARIABLES
    }
    assert len(texts) == 12
    of_usual_steps = [
        name for name in texts if "block_size of" in texts[name] or "but" in texts[name]
    ]
    assert len(of_usual_steps) == 4
    names = {"max_num_seqs": max_num_seqs, "block_size": block_size, "min": min, "max": max}
    for name in texts.keys() - of_usual_steps:
        dimension, part = name.removeprefix("VLLM_").lower().split("_bucket_")
        found = getattr(getattr(settings, dimension), part)
        assert (name, found) == (name, eval(texts[name], names))


@pytest.mark.parametrize(
    ("max_num_seqs", "block_size", "prompt_seq", "decode_block"),
    [
        (256, 128, "[128, 128, 1024]", "[128, 128, 4096]"),
        (256, 16, "[128, 128, 1024]", "[1024, 1024, 32768]"),
        (256, 512, "[512, 512, 1024]", "[32, 32, 1024]"),
        (4, 16, "[128, 128, 1024]", "[1024, 1024, 1024]"),
    ],
)
def test_default_steps_have_as_many_tokens_whatever_the_block_size(
    max_num_seqs, block_size, prompt_seq, decode_block
):
    limits = make_limits(max_num_seqs=max_num_seqs, block_size=block_size)
    found = usual_steps(BucketSettings.resolve(limits), limits)
    assert ranges(found)[1::2] == [prompt_seq, decode_block]
    given = {"VLLM_DECODE_BLOCK_BUCKET_STEP": 64, "VLLM_PROMPT_SEQ_BUCKET_MAX": 64}
    settings = BucketSettings.resolve(limits, given)
    found = usual_steps(settings, limits)
    assert found.decode_block == settings.decode_block
    assert found.prompt_seq.max == 64


def test_a_default_step_of_prompts_is_within_the_tokens_of_a_step():
    limits = make_limits(max_num_batched_tokens=64, max_model_len=60, block_size=16)
    found = usual_steps(BucketSettings.resolve(limits), limits)
    assert found.prompt_seq == BucketRange(64, 64, 64)


def test_a_set_variable_replaces_its_default():
    given = {
        "VLLM_PROMPT_BS_BUCKET_STEP": 16,
        "VLLM_PROMPT_SEQ_BUCKET_MIN": 24576,
        "VLLM_PROMPT_SEQ_BUCKET_STEP": 2048,
        "VLLM_PROMPT_SEQ_BUCKET_MAX": 32768,
        "VLLM_DECODE_BLOCK_BUCKET_MAX": 33792,
        "VLLM_DECODE_BS_BUCKET_MIN": None,
    }
    settings = BucketSettings.resolve(make_limits(max_num_seqs=128), given)
    assert ranges(settings) == [
        "[1, 16, 64]",
        "[24576, 2048, 32768]",
        "[1, 32, 128]",
        "[128, 128, 33792]",
    ]
    assert settings.is_given("VLLM_DECODE_BLOCK_BUCKET_MAX")
    assert not settings.is_given("VLLM_DECODE_BS_BUCKET_MIN")


def test_a_default_gives_way_to_what_was_set():
    limits = make_limits(max_num_seqs=128)
    low_max = BucketSettings.resolve(limits, {"VLLM_PROMPT_SEQ_BUCKET_MAX": 64})
    assert low_max.prompt_seq == BucketRange(64, 128, 64)
    high_min = BucketSettings.resolve(limits, {"VLLM_PROMPT_SEQ_BUCKET_MIN": 2048})
    assert high_min.prompt_seq == BucketRange(2048, 128, 2048)


def test_prompts_are_not_prepared_beyond_the_longest():
    settings = BucketSettings.resolve(make_limits(max_model_len=300))
    assert settings.prompt_seq == BucketRange(128, 128, 384)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"VLLM_PROMPT_BS_BUCKET_MIN": 0}, "VLLM_PROMPT_BS_BUCKET_MIN=0 must be"),
        ({"VLLM_PROMPT_BLOCK_BUCKET_MIN": 1}, "VLLM_PROMPT_BLOCK_BUCKET_MIN is not a bucket"),
        (
            {"VLLM_DECODE_BS_BUCKET_MIN": 8, "VLLM_DECODE_BS_BUCKET_MAX": 4},
            "VLLM_DECODE_BS_BUCKET_MIN=8 is greater than VLLM_DECODE_BS_BUCKET_MAX=4",
        ),
    ],
)
def test_a_bad_variable_is_named_with_its_value(given, message):
    with pytest.raises(ConfigError, match=message):
        BucketSettings.resolve(make_limits(), given)


def test_the_advice_for_a_range_that_is_upside_down_helps():
    name = "VLLM_PROMPT_SEQ_BUCKET"
    given, limits = {f"{name}_MIN": 512, f"{name}_MAX": 256}, make_limits()
    with pytest.raises(
        ConfigError, match=r"Lower .* or raise .*\. Or unset one of the two"
    ) as caught:
        BucketSettings.resolve(limits, given)
    assert "VLLM_SKIP_WARMUP" not in str(caught.value)
    for changes in ({f"{name}_MIN": 256}, {f"{name}_MAX": 512}):
        BucketSettings.resolve(limits, given | changes)
    for kept in given:
        BucketSettings.resolve(limits, {kept: given[kept]})


def test_merged_prompts_are_one_long_row():
    settings, lines = merge_prompts(make_settings(prompt_bs=(1, 32, 16)), make_limits())
    assert settings.prompt_bs == BucketRange(1, 1, 1)
    assert settings.prompt_seq == BucketRange(128, 128, 8192)
    assert lines == (
        "Merged prefill is enabled!",
        "Overriding prompt bucketing settings!",
        "prompt bs cfg: [1, 32, 16] -> [1, 1, 1]",
        "prompt seq cfg: [128, 128, 1024] -> [128, 128, 8192]",
    )
