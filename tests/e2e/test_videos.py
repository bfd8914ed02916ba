"""Test videos in prompts: the engine gives the tokens of transformers, and reads files and frames
alike.
"""

import base64
import json

import pytest

from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import scheduler_of
from tests.tiny_images import draw_image, expected_outputs, make_tiny_images
from tests.tiny_videos import draw_frames, make_video
from vllm import LLM, SamplingParams
from vllm.errors import RequestError
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.video.frames import FrameChoice, read_frames
from vllm.transformers_utils.transformers_version import is_version_4

Image = pytest.importorskip("PIL.Image", reason="images need Pillow")
pytest.importorskip("av", reason="videos need PyAV")

pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers spells the positions of videos in another way"
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 384,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 150,
}
IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
GLM_VIDEO = "<|begin_of_video|><|video|><|end_of_video|>"
SIDE = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_5": 32, "glm4v": 28}
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
MORE_FAMILIES = [
    pytest.param(name, marks=pytest.mark.exhaustive) for name in SIDE if name not in FAMILIES
]
# The largest position in time must be below the width of the frames. Otherwise the text after a
# video continues from the width in transformers 5, but from the largest position in the paper and
# in version 4.
PROMPTS = [
    ("What happens VIDEO here?", [], [(6, 8.0)]),
    ("IMAGE and VIDEO and IMAGE", [1, 2], [(3, 4.0)]),
    ("VIDEOVIDEO Compare.", [], [(2, 2.0), (4, 4.0)]),
    ("No video at all.", [], []),
    ("What happens VIDEO here?", [], [(2, 1.0)]),
]


def films_of(family, videos):
    """Return frames of a size that no limit changes."""
    side = SIDE[family]
    return [
        (draw_frames(count, height=2 * side, width=3 * side, seed=count), rate)
        for count, rate in videos
    ]


def prompts_of(family):
    """Return the prompts of a family. In transformers, GLM does not accept an image and a video in
    one prompt."""
    if family != "glm4v":
        return PROMPTS
    return [(text.replace("IMAGE", "image"), [], films) for text, _, films in PROMPTS]


def requests_of(family):
    video = GLM_VIDEO if family == "glm4v" else VIDEO
    return [
        {
            "prompt": text.replace("IMAGE", IMAGE).replace("VIDEO", video),
            "multi_modal_data": {
                "image": [draw_image(seed, 56, 56) for seed in seeds],
                "video": [(frames, {"fps": rate}) for frames, rate in films_of(family, videos)],
            },
        }
        for text, seeds, videos in prompts_of(family)
    ]


def make_model(family, folder):
    """Make a small model whose videos are not resized."""
    make_tiny_images(family, folder)
    size = {"shortest_edge": 28**2, "longest_edge": 1000 * 28**2}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    return folder


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_tokens_are_those_of_transformers(family, tmp_path):
    folder = make_model(family, tmp_path)
    llm = LLM(str(folder), **ENGINE)
    outputs = llm.generate(requests_of(family), GREEDY)
    prompts = [
        (output.prompt_token_ids, [draw_image(seed, 56, 56) for seed in seeds])
        for output, (_, seeds, _) in zip(outputs, prompts_of(family), strict=True)
    ]
    films = [films_of(family, videos) for *_, videos in prompts_of(family)]
    expected = expected_outputs(folder, prompts, GREEDY.max_tokens, films)
    assert tokens_of(outputs) == expected
    assert len({tuple(tokens) for tokens in expected}) > 3, "videos make no difference"
    # Run again with cached prefixes.
    cached = llm.generate(requests_of(family), GREEDY)
    assert tokens_of(cached) == expected
    assert sum(output.num_cached_tokens for output in cached) > 80
    # Run the prompts in chunks that end inside of videos.
    llm = LLM(str(folder), **ENGINE, max_num_batched_tokens=8)
    assert tokens_of(llm.generate(requests_of(family), GREEDY)) == expected
    assert not scheduler_of(llm).media.holders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))
    (made / "film.mp4").write_bytes(FILM)
    return made


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(
        str(folder),
        **ENGINE,
        limit_mm_per_prompt={"image": 1, "video": {"count": 2, "num_frames": 6}},
        media_io_kwargs={"video": {"num_frames": 4}},
        allowed_local_media_path=str(folder),
    )


FILM = make_video("mp4", [200, 150, 100, 50], rate=4)
"""All frames are read."""
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'video' %}VIDEO"
    "{% elif p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
).replace("VIDEO", VIDEO)


def generate(llm, *videos, text=VIDEO, **more):
    prompt = {"prompt": text, "multi_modal_data": {"video": list(videos)}, **more}
    (output,) = llm.generate([prompt], GREEDY)
    return output


def test_every_way_to_give_a_video_is_the_same(llm, folder):
    source = MediaSource(modality="video", where="film", data=FILM)
    choice = FrameChoice(num_frames=4, fps=-1.0, max_given=4, max_pixels=10**6)
    frames = read_frames(source, choice).pixels
    data = base64.b64encode(FILM).decode()
    ways = [
        {"type": "video", "video": FILM},
        {"type": "video", "path": str(folder / "film.mp4")},
        {"type": "video", "video": (frames, {"fps": 4})},
        {"type": "video", "video": ([Image.fromarray(each) for each in frames], {"fps": 4})},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
    ]
    question = {"type": "text", "text": "What is <|video_pad|>?"}
    asked = [[{"role": "user", "content": [way, question]}] for way in ways]
    outputs = llm.chat(asked, GREEDY, chat_template=TEMPLATE)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 1
    assert len({tuple(each.prompt_token_ids) for each in outputs}) == 1
    text = llm.get_tokenizer().decode(outputs[0].prompt_token_ids)
    assert text.endswith("What is <|video_pad|>?")
    assert tokens_of([generate(llm, FILM)]) == tokens_of([generate(llm, (frames, {"fps": 4}))])
    # A template without support for videos gets the text that represents a video.
    in_text = llm.chat(asked[0], GREEDY)[0]
    assert VIDEO.split("<|video_pad|>")[0] in llm.get_tokenizer().decode(in_text.prompt_token_ids)


def test_fewer_frames_of_a_file_can_be_chosen(llm):
    long = make_video("webm", range(0, 240, 6), rate=10)
    tokens = generate(llm, long).prompt_token_ids
    four = generate(llm, draw_frames(4, height=48, width=64)).prompt_token_ids
    assert len(tokens) == len(four)
    smaller = {"video_size": {"shortest_edge": 1, "longest_edge": 28 * 28}}
    assert len(generate(llm, long, mm_processor_kwargs=smaller).prompt_token_ids) == 2 + 2
    larger = {"video_size": {"shortest_edge": 1, "longest_edge": 10**7}}
    with pytest.raises(RequestError, match=r"a video could have .* started for videos of at most"):
        generate(llm, long, mm_processor_kwargs=larger)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen2_5_vl", "HPU graphs"),
        *(
            pytest.param(family, mode, marks=pytest.mark.exhaustive)
            for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
            for mode in MODES
            if (family, mode) != ("qwen2_5_vl", "HPU graphs")
        ),
    ],
)
def test_on_a_simulated_card_nothing_compiles_after_the_warm_up(family, mode, tmp_path):
    folder = make_model(family, tmp_path)
    requests = requests_of(family)
    expected = tokens_of(LLM(str(folder), **ENGINE).generate(requests, GREEDY))
    lazy, eager = MODES[mode]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **FEW_BUCKETS) as bridge:
        llm = LLM(str(folder), **ENGINE, enforce_eager=eager)
        before = bridge.counters()
        assert tokens_of(llm.generate(requests, GREEDY)) == expected
        assert bridge.counters().compilations == before.compilations


@pytest.mark.parametrize(
    ("videos", "message"),
    [
        ([b"?"], r"multi_modal_data\['video'\]\[0\]: it must be a video of MP4"),
        ([draw_frames(7)], "has 7 frames, and at most 6 are accepted"),
        ([draw_frames(1)] * 3, "a prompt may have at most 2 videos, got 3"),
        ([5], r"\['video'\]\[0\] must be the bytes of a file, an array or tensor"),
        (
            [draw_frames(2)] * 2,
            "must have as many placeholders <|video_pad|> as videos, got 1",
        ),
    ],
)
def test_other_videos_are_refused_in_one_sentence(llm, videos, message):
    with pytest.raises(RequestError, match=message):
        generate(llm, *videos)


def test_names_of_videos_replace_their_content_in_caches(llm):
    frames = draw_frames(2, seed=7)
    named = {"multi_modal_uuids": {"video": ["film"]}}
    llm.reset_prefix_cache()
    first = generate(llm, frames, **named)
    same = generate(llm, frames, **named)
    other = generate(llm, frames, multi_modal_uuids={"video": ["other"]})
    assert tokens_of([first]) == tokens_of([same]) == tokens_of([other])
    # A prompt with another number of frames needs other embeddings than those in the cache under
    # this name.
    for number in (6, 4, 6):
        longer = draw_frames(number, seed=8)
        assert tokens_of([generate(llm, longer, **named)]) == tokens_of([generate(llm, longer)])
    with pytest.raises(RequestError, match=r"\['video'\] must be a list of 1 non-empty strings"):
        generate(llm, frames, multi_modal_uuids={"video": ["a", "b"]})
    with pytest.raises(RequestError, match=r"such as \{'image': \[...\], 'video': \[...\]\}"):
        generate(llm, frames, multi_modal_uuids={"audio": ["a"]})


def test_a_model_without_ears_says_what_it_reads(llm):
    with pytest.raises(RequestError, match="this model reads images and videos and no other media"):
        llm.generate([{"prompt": "a", "multi_modal_data": {"audio": [0.0, 0.0]}}], GREEDY)
