"""Test sounds in prompts: the engine gives the tokens of transformers in any batch."""

import numpy as np
import pytest

from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.multimodal.sound_models import make_sound
from tests.reach import media_of, scheduler_of
from tests.tiny_audio import FAMILIES, PIECE, expected_outputs, make_tiny_audio
from vllm import LLM, SamplingParams
from vllm.errors import RequestError
from vllm.worker.parts.embedding_rows import EmbeddingRows

pytest.importorskip("av", reason="sounds need PyAV")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WITH_LOGPROBS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 384,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 160,
}
PROMPTS = [
    ("What is in SOUND this?", [1]),
    ("SOUNDSOUND Compare.", [1, 2]),
    ("No sound at all.", []),
    ("First SOUND, then some words, then SOUND", [3, 1]),
    ("SOUND", [4]),
]
LENGTHS = [PIECE, 16161, 4000, PIECE // 2, 20000]
LONG = PIECE * 3 - 5000


def sounds_of(seeds):
    return [make_sound(seed, LENGTHS[seed % len(LENGTHS)]) for seed in seeds]


def requests_of(family):
    found = [(text, sounds_of(seeds)) for text, seeds in PROMPTS]
    if family == "voxtral":
        found.append(("A long SOUND", [make_sound(9, LONG)]))
    sound = FAMILIES[family].in_text
    return [
        {"prompt": text.replace("SOUND", sound), "multi_modal_data": {"audio": sounds}}
        for text, sounds in found
    ]


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return make_tiny_audio(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **ENGINE)


@pytest.fixture(scope="module")
def expected(family, llm):
    return tokens_of(llm.generate(requests_of(family), GREEDY))


def test_tokens_and_logprobs_are_those_of_transformers(family, folder, llm):
    requests = requests_of(family)
    outputs = llm.generate(requests, WITH_LOGPROBS)
    prompts = [
        (output.prompt_token_ids, request["multi_modal_data"]["audio"])
        for output, request in zip(outputs, requests, strict=True)
    ]
    wanted = expected_outputs(folder, prompts, GREEDY.max_tokens)
    assert tokens_of(outputs) == [each.token_ids for each in wanted]
    for output, each in zip(outputs, wanted, strict=True):
        (made,) = output.outputs
        found = [
            step[token].logprob for step, token in zip(made.logprobs, made.token_ids, strict=True)
        ]
        assert found == pytest.approx(each.logprobs, abs=2e-4)
    assert len({tuple(each.token_ids) for each in wanted}) > 3, "sounds make no difference"
    assert not scheduler_of(llm).media.holders


def test_pieces_of_prompts_may_end_inside_of_sounds(family, folder, expected):
    llm = LLM(str(folder), **ENGINE, max_num_batched_tokens=8)
    assert tokens_of(llm.generate(requests_of(family), GREEDY)) == expected
    assert not scheduler_of(llm).media.holders


def ask(family, text, *sounds):
    text = text.replace("SOUND", FAMILIES[family].in_text)
    return {"prompt": text, "multi_modal_data": {"audio": list(sounds)}}


def test_equal_sounds_are_encoded_once_and_others_are_told_apart(family, folder, llm):
    plain = LLM(str(folder), **ENGINE, enable_prefix_caching=False)
    media = media_of(llm, EmbeddingRows)
    one, other = make_sound(21, 20000), make_sound(22, 20000)
    start = "The same words before SOUND"

    def check(*prompts):
        before = media.num_encoded
        outputs = llm.generate(list(prompts), GREEDY)
        assert tokens_of(outputs) == tokens_of(plain.generate(list(prompts), GREEDY))
        return outputs, media.num_encoded - before

    equal = [ask(family, start + " and one end", one), ask(family, start + " or two", one)]
    assert check(*equal)[1] == 1
    # The cached prefix holds the sound, which is not encoded again.
    (output,), num_encoded = check(ask(family, start + " and one more end", one))
    assert num_encoded == 0 and output.num_cached_tokens > len(start) + 20
    # Another sound after the same words has the same token ids, but shares no cached prefix.
    (output,), num_encoded = check(ask(family, start + " and one end", other))
    assert num_encoded == 1 and output.num_cached_tokens < len(start) + 20
    _, num_encoded = check(ask(family, "SOUNDSOUND", one, other))
    assert num_encoded == 0


@pytest.mark.parametrize(
    ("text", "sounds", "message"),
    [
        ("SOUND", [make_sound(1, 0)], None),
        (
            "SOUND",
            [np.zeros(80 * PIECE + 1, np.float32)],
            r"this model reads only sounds of .*a shorter one",
        ),
        ("SOUND", [np.full(1000, np.nan, np.float32)], "floats from -1 to 1"),
        ("SOUNDSOUND", [make_sound(1, 1000)], "got 2 placeholders and 1 sounds"),
        ("none", [make_sound(1, 1000)], "got 0 placeholders and 1 sounds"),
        ("SOUND" * 17, [make_sound(1, 1000)] * 17, "at most 16 sounds, got 17"),
    ],
    ids=str,
)
def test_wrong_sounds_are_refused_in_one_line(family, llm, text, sounds, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate([ask(family, text, *sounds)], GREEDY)
    assert "\n" not in str(caught.value)
    assert not scheduler_of(llm).media.holders


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"size": 1}, "WhisperFeatureExtractor has no setting 'size'"),
        ({"chunk_length": 10**9}, "chunk_length is 1000000000"),
        ({"chunk_length": 4}, "max_source_positions"),
    ],
    ids=str,
)
def test_settings_of_a_request_that_do_not_fit_the_model_are_refused(
    family, llm, overrides, message
):
    prompt = ask(family, "SOUND", make_sound(1, 1000)) | {"mm_processor_kwargs": overrides}
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], GREEDY)


def test_images_are_refused_by_a_model_of_sound(family, llm):
    prompt = {"prompt": "a", "multi_modal_data": {"image": [np.zeros((8, 8, 3), np.uint8)]}}
    with pytest.raises(RequestError, match="image"):
        llm.generate([prompt], GREEDY)


@pytest.mark.parametrize(
    "mode",
    [
        "HPU graphs",
        *(
            pytest.param(m, marks=pytest.mark.exhaustive)
            for m in ("lazy", "torch.compile", "eager")
        ),
    ],
)
def test_on_a_simulated_card_nothing_compiles_after_the_warm_up(family, mode, folder, expected):
    lazy, eager = MODES[mode]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=lazy, **FEW_BUCKETS) as bridge:
        llm = LLM(str(folder), **ENGINE, enforce_eager=eager)
        before = bridge.counters()
        assert tokens_of(llm.generate(requests_of(family), GREEDY)) == expected
        assert bridge.counters().compilations == before.compilations
