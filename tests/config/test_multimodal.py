"""Test the settings of images: the spellings of limits, and refused values."""

import pytest

from vllm.config import MultiModalConfig
from vllm.config.multimodal import ItemLimit
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser

LARGE = '{"image": {"count": 4, "width": 1024, "height": 768}, "video": 0}'


def parse(*flags):
    return EngineArgs.from_cli_args(
        EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    )


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ("image=2", ItemLimit(count=2)),
        ("image=2, video=1", ItemLimit(count=2)),
        ("3", ItemLimit(count=3)),
        ('{"image": 0}', ItemLimit(count=0)),
        (LARGE, ItemLimit(count=4, width=1024, height=768)),
        ("video=1", ItemLimit(count=16)),
        ('{"image": {"width": 64, "height": 9}}', ItemLimit(count=16, width=64, height=9)),
        ({"image": 5}, ItemLimit(count=5)),
        (5, ItemLimit(count=5)),
        (None, ItemLimit(count=16)),
    ],
)
def test_limits_are_written_as_numbers_by_name_or_as_json(given, limit):
    args = EngineArgs(limit_mm_per_prompt=given)
    assert MultiModalConfig(limit_mm_per_prompt=args.limit_mm_per_prompt).limit("image") == limit
    if isinstance(given, str):
        assert parse("--limit-mm-per-prompt", given) == args


@pytest.mark.parametrize("text", ["image", "image=", "image=one", "[1]", "{", "-1"])
def test_other_ways_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        parse(f"--limit-mm-per-prompt={text}")
    assert "--limit-mm-per-prompt: must be " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"limit_mm_per_prompt": {"picture": 1}},
            "the unknown kind of media 'picture'; accepted: image, audio, vid",
        ),
        ({"limit_mm_per_prompt": {"image": -1}}, "image must be an integer of at least 0"),
        ({"limit_mm_per_prompt": {"image": "1"}}, "image must be an integer of at least 0"),
        (
            {"limit_mm_per_prompt": {"image": {"width": 0}}},
            "image: width must be an integer of at least 1",
        ),
        ({"limit_mm_per_prompt": {"image": {"size": 1}}}, "image has the unknown key 'size'"),
        ({"limit_mm_per_prompt": {"image": {"width": 9}}}, "image must have both width and height"),
        (
            {"limit_mm_per_prompt": {"audio": {"length": 9}}},
            "audio has the unknown key 'length'; accepted: c",
        ),
        ({"limit_mm_per_prompt": {"video": {"width": 9}}}, "accepted: count, num_frames"),
        ({"limit_mm_per_prompt": {"video": "2"}}, 'as {"count": 4, "num_frames": 4}; got'),
        (
            {"media_io_kwargs": {"audio": {"rate": 1}}},
            "audio has the unknown key 'rate'; accepted: none",
        ),
        ({"media_io_kwargs": {"video": {"frames": 1}}}, "accepted: num_frames, fps"),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "num_frames must be an integer from 1"),
        ({"media_io_kwargs": {"video": {"num_frames": 769}}}, "from 1 to 768, or -1 for no limit"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "fps must be a number above 0 and up to 1000"),
        ({"media_io_kwargs": {"video": {"fps": 10**400}}}, "up to 1000, or -1 for no limit, got 1"),
        ({"media_io_kwargs": {"picture": {}}}, "the unknown kind of media 'picture'"),
        ({"media_io_kwargs": {"image": 1}}, "image must be an object, got 1"),
        ({"media_io_kwargs": {"image": {"a": 1}}}, "image has the unknown key 'a'"),
        (
            {"media_io_kwargs": {"image": {"rgba_background_color": [1, 2]}}},
            "three integers from 0 to 255",
        ),
        ({"mm_processor_cache_gb": -1.0}, "mm_processor_cache_gb must be at least 0, got -1.0"),
        ({"mm_processor_cache_gb": float("nan")}, "mm_processor_cache_gb must be at least 0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError) as failure:
        MultiModalConfig(**settings)
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("limits", "video", "num_frames", "max_frames", "counts"),
    [
        ({}, {}, 32, 768, (16, 16, 4)),
        ({"image": 0}, {}, 32, 768, (0, 16, 0)),
        ({"image": 0, "video": 2}, {}, 32, 768, (0, 16, 2)),
        ({"video": {"num_frames": 8}, "audio": 1}, {}, 8, 8, (16, 1, 4)),
        ({"video": {"num_frames": 8}}, {"num_frames": -1}, 8, 8, (16, 16, 4)),
        ({}, {"num_frames": -1, "fps": 2}, 768, 768, (16, 16, 4)),
        ({"video": {"num_frames": 64}}, {"num_frames": 40}, 40, 64, (16, 16, 4)),
    ],
)
def test_limits_of_videos_and_sounds(limits, video, num_frames, max_frames, counts):
    config = MultiModalConfig(limit_mm_per_prompt=limits, media_io_kwargs={"video": video})
    assert (config.video.num_frames, config.max_frames) == (num_frames, max_frames)
    assert config.video.fps == video.get("fps", -1.0)
    assert tuple(config.counts.values()) == counts


def test_settings_have_the_values_that_the_engine_reads():
    config = MultiModalConfig()
    assert config.background == (255, 255, 255)
    assert config.processor_cache_bytes == 4 * 2**30
    assert MultiModalConfig(disable_mm_preprocessor_cache=True).processor_cache_bytes == 0
    black = {"image": {"rgba_background_color": [0, 0, 0]}, "video": {"num_frames": 40}}
    assert MultiModalConfig(media_io_kwargs=black).background == (0, 0, 0)


def test_settings_of_images_have_no_effect_on_a_model_that_reads_text(capsys):
    config = EngineArgs(limit_mm_per_prompt="image=2", mm_processor_cache_gb=1)
    assert config.create_engine_config().multimodal.limit("image").count == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "reads text only" in line]
    assert [line.split("] ")[1].split(" ")[0] for line in lines] == [
        "limit_mm_per_prompt",
        "mm_processor_cache_gb",
    ]
