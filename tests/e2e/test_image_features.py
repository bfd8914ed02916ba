"""Test images together with every other feature of requests, and the refused combinations."""

import io
import shutil

import numpy as np
import pytest

from tests.quantized_checkpoints import write as write_quantized
from tests.reach import log_cache_events, scheduler_of, worker_of
from tests.tiny_images import draw_image, make_tiny_images
from vllm import LLM, SamplingParams
from vllm.errors import RequestError, WeightLoadError
from vllm.sampling_params import BeamSearchParams

pillow = pytest.importorskip("PIL.Image", reason="images need Pillow")
torch = pytest.importorskip("torch")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 120,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_images("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **ENGINE)


@pytest.fixture(scope="module")
def plain(folder):
    """Return an engine that keeps no blocks between requests and runs prompts in chunks."""
    return LLM(str(folder), **ENGINE, enable_prefix_caching=False, max_num_batched_tokens=24)


def ask(text, *images, **others):
    return {"prompt": text, "multi_modal_data": {"image": list(images)}, **others}


def tokens_of(outputs):
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


IMAGE = draw_image(1, 32, 32)
FLOATS = np.full((8, 8, 3), 0.5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ask("<image>", np.full((8, 8, 3), np.nan)), r"must be an image .*got ndarray \[8, 8, 3\]"),
        (ask("<image>", FLOATS.astype(object)), r"must be an image .*of object"),
        (ask("<image>", FLOATS > 0), r"must be an image .*of bool"),
        (ask("<image>", np.zeros((0, 8, 3))), r"must be an image .*got ndarray \[0, 8, 3\]"),
        (ask("<image>", memoryview(b"1")), "must be an image .*got memoryview$"),
        (ask("<image>", "a.png"), "must be an image .*got str$"),
        (ask("<image>", torch.empty(3, 8, 8, device="meta")), r"got Tensor \[3, 8, 8\]"),
        (ask("<image>", torch.rand(3, 8, 8).to_sparse()), r"got Tensor \[3, 8, 8\]"),
        (ask("<image>", torch.zeros(1, 16, 48)), r"must be an image .*\[1, 16, 48\]"),
        (ask("<image><image>", IMAGE, b"no"), r"\['image'\]\[1\]: it is no image"),
        (ask("<image>", np.zeros((5000, 1, 3), np.uint8)), "1 x 5000 pixels"),
        (ask("<image>" * 17, *[IMAGE] * 17), "at most 16 images, got 17"),
        (ask("<image><image>", IMAGE), "got 2 placeholders and 1 images"),
        (ask("none", IMAGE), "got 0 placeholders and 1 images"),
        ({"prompt": "<image>", "multi_modal_data": IMAGE}, "must be a dict .*got ndarray"),
        ({"prompt": "<image>", "multi_modal_data": {"image_embeds": FLOATS}}, "'image_embeds'"),
        (ask("<image>" * 16, *[IMAGE] * 16), "prompt has 256 tokens"),
        (ask("<image>", IMAGE, multi_modal_uuids="a"), "multi_modal_uuids must be a dict.*str"),
        (ask("<image>", IMAGE, multi_modal_uuids={"video": ["a"]}), r"got \['video'\]"),
        *(
            (ask("<image>", IMAGE, multi_modal_uuids={"image": uuids}), "list of 1 non-empty")
            for uuids in (["a", "b"], [5], [""], 5)
        ),
        (ask("<image>", IMAGE, mm_processor_kwargs=[1]), "must be a dict .*got list"),
        (ask("<image>", IMAGE, mm_processor_kwargs={1: 2, "a": 3}), "keys are strings"),
        (
            ask("<image>", IMAGE, mm_processor_kwargs={"size": FLOATS}),
            "values that JSON can express",
        ),
        (ask("<image>", IMAGE, mm_processor_kwargs={"no": 1}), "no setting 'no'"),
        *(
            (ask("<image>", IMAGE, mm_processor_kwargs={"size": {"shortest_edge": edge}}), "size")
            for edge in (100_000, 65)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_prompt_is_refused_in_one_line(llm, prompt, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompt, GREEDY)
    assert len(str(caught.value).splitlines()) == 1
    assert not scheduler_of(llm).media.holders


def test_every_form_of_an_image_is_the_same(llm):
    file = io.BytesIO()
    pillow.fromarray(IMAGE).save(file, "PNG")
    pixels = torch.from_numpy(IMAGE)
    forms = [
        *(IMAGE, IMAGE.astype(np.int64), IMAGE / 255, IMAGE.transpose(2, 0, 1)),
        *(pillow.fromarray(IMAGE), file.getvalue(), pixels, pixels.permute(2, 0, 1) / 255),
        (pixels / 255).requires_grad_(),
    ]
    want, *others = tokens_of(llm.generate([ask("<image> a", form) for form in forms], GREEDY))
    assert all(tokens == want for tokens in others)
    half = torch.full((3, 8, 8), 0.5)
    first, second = tokens_of(
        llm.generate([ask("<image>", half.bfloat16()), ask("<image>", half)], GREEDY)
    )
    assert first == second


def test_beams_keep_the_images_and_the_salt_of_their_prompt(llm, plain):
    prompts = [ask("<image> a", IMAGE), {"prompt": "no <image>"}, ask("<image> b", draw_image(2))]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    want = plain.generate(prompts, greedy)
    one = BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True)
    for beams, output in zip(llm.beam_search(prompts, one), want, strict=True):
        expected = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert beams.sequences[0].tokens == expected
    wide = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    first, salted = llm.beam_search([prompts[0], {**prompts[0], "cache_salt": "s"}], wide)
    assert [each.tokens for each in first.sequences] == [each.tokens for each in salted.sequences]
    assert llm.generate({**prompts[0], "cache_salt": "s"}, greedy)[0].num_cached_tokens


def test_beams_of_a_text_go_on_behind_the_token_of_an_image(folder):
    llm = LLM(str(folder), **ENGINE, max_logprobs=600)
    width, prompt = 220, {"prompt": "No picture"}
    (first,) = llm.generate(prompt, SamplingParams(max_tokens=1, logprobs=width))
    placeholder = llm.get_tokenizer().convert_tokens_to_ids("<image>")
    assert first.outputs[0].logprobs[0][placeholder].rank <= width
    params = BeamSearchParams(beam_width=width, max_tokens=2, ignore_eos=True)
    (beams,) = llm.beam_search([prompt], params)
    assert len(beams.sequences) == width


def test_beams_continue_the_positions_of_an_image(tmp_path):
    folder = make_tiny_images("qwen2_vl", tmp_path)
    llm = LLM(str(folder), **ENGINE)
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    for text in (f"{pad} what", f"x {pad}", "text <|image_pad|> alone"):
        prompt = ask(text, *[draw_image(3, 100, 30)] * ("start" in text))
        (output,) = llm.generate(prompt, GREEDY)
        params = BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True)
        (beams,) = llm.beam_search([prompt], params)
        expected = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert beams.sequences[0].tokens == expected
    (short,) = llm.generate(prompt, SamplingParams(max_tokens=2, truncate_prompt_tokens=5))
    assert len(short.prompt_token_ids) == 5


def requests_of(image="<image>"):
    one, two, three = draw_image(1), draw_image(2, 32, 32), draw_image(3, 100, 30)
    return [
        ask(f"abc abc abc {image} abc abc {image} abc abc abc", one, one),
        ask(f"{image}{image} Compare.", one, two),
        ask("No picture at all."),
        ask(f"First {image}, then some words, then {image}", three, one),
        ask(image, draw_image(4, 64, 64)),
        ask(f"What is in {image} this picture?", one),
    ]


@pytest.fixture(scope="module")
def expected(plain):
    return tokens_of(plain.generate(requests_of(), GREEDY))


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"speculative_config": {"num_speculative_tokens": 3}},
        {"num_scheduler_steps": 4, "async_scheduling": False},
        {"disable_chunked_mm_input": True, "max_num_batched_tokens": 24, "max_num_seqs": 4},
        # the encoder cache has room for two images, and requests are preempted
        {
            "encoder_cache": 16,
            "max_num_batched_tokens": 16,
            "max_model_len": 96,
            "block_size": 4,
            "num_gpu_blocks_override": 25,
        },
    ],
    ids=str,
)
def test_settings_of_the_engine_change_no_token(folder, expected, settings, monkeypatch):
    settings = dict(settings)
    if size := settings.pop("encoder_cache", None):
        monkeypatch.setattr("vllm.config.scheduler.ENCODER_CACHE_SIZE", size)
    if speculation := settings.get("speculative_config"):
        own = {} if "method" in speculation else {"model": str(folder)}
        settings["speculative_config"] = {**speculation, **own}
    llm = LLM(str(folder), **{**ENGINE, **settings})
    for _ in range(2):  # the second time with cached prefixes
        assert tokens_of(llm.generate(requests_of(), GREEDY)) == expected
    media = scheduler_of(llm).media
    assert not media.holders
    assert media.num_kept <= media.capacity
    assert size is None or (media.capacity == 32 and scheduler_of(llm).num_preemptions)


def test_a_cached_prefix_with_an_image_belongs_to_its_content_and_salt(llm, plain):
    media = scheduler_of(llm).media
    text = "Look at this, all of you: <image> "
    image, other = draw_image(11), draw_image(12)

    def run(prompt):
        queries, hits = media.num_queries, media.num_hits
        (output,) = llm.generate(prompt, GREEDY)
        assert tokens_of([output]) == tokens_of(plain.generate(prompt, GREEDY))
        num_encoded = media.num_queries - queries - (media.num_hits - hits)
        return output.num_cached_tokens, num_encoded

    long = "and tell me what"
    assert run(ask(text + long, image)) == (0, 1)
    assert run(ask(text + long + " you see", image)) == (48, 0)
    assert run(ask(text + "then", image)) == (32, 0)
    assert run(ask(text + "then", other)) == (16, 1)
    assert run(ask(text + "then", image, cache_salt="other")) == (0, 1)
    media.clear()  # cached blocks stay: an image before their end is not encoded again
    assert run(ask(text + long + " you like", image)) == (64, 0)
    assert run(ask(text + "else", image)) == (32, 1)
    named = {"multi_modal_uuids": {"image": ["name"]}}
    first = llm.generate(ask(text, image, **named), GREEDY)
    (second,) = llm.generate(ask(text, other, **named), GREEDY)
    assert tokens_of(first) == tokens_of([second])
    assert second.num_cached_tokens == 32
    settings = {"mm_processor_kwargs": {"image_mean": [0.1, 0.2, 0.3]}}
    (changed,) = llm.generate(ask(text, image, **named, **settings), GREEDY)
    assert changed.num_cached_tokens == 16


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 0, "bad_words": ["<image>", "a"]},
        {"temperature": 1, "n": 3, "seed": 7},
        {"temperature": 0, "prompt_logprobs": 2},
    ],
    ids=lambda sampling: str(list(sampling)),
)
def test_sampling_is_the_same_in_pieces_and_behind_cached_prefixes(llm, plain, sampling):
    params = SamplingParams(max_tokens=6, **sampling)
    want = plain.generate(requests_of(), params)
    for _ in range(2):
        found = llm.generate(requests_of(), params)
        assert tokens_of(found) == tokens_of(want)
        for one, other in zip(found, want, strict=True):
            assert (one.prompt_logprobs is None) == ("prompt_logprobs" not in sampling)
            for entries, others in zip(
                one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True
            ):
                assert {key: round(each.logprob, 3) for key, each in (entries or {}).items()} == {
                    key: round(each.logprob, 3) for key, each in (others or {}).items()
                }


def test_tokens_that_are_expanded_already_are_left_as_they_are(llm):
    (want,) = llm.generate(ask("Look: <image> x", IMAGE), GREEDY)
    token = llm.get_tokenizer().convert_tokens_to_ids("<image>")
    start = want.prompt_token_ids.index(token)
    short = [*want.prompt_token_ids[: start + 1], *want.prompt_token_ids[start + 16 :]]
    for token_ids in (want.prompt_token_ids, short):
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": IMAGE}}
        (found,) = llm.generate(prompt, GREEDY)
        assert found.prompt_token_ids == want.prompt_token_ids
        assert tokens_of([found]) == tokens_of([want])
    for token_ids in ([*short[:start], *[token] * 3], [5, token]):
        images = {"multi_modal_data": {"image": IMAGE}} if len(token_ids) > 2 else {}
        with pytest.raises(RequestError, match="as many placeholders <image> as images, got"):
            llm.generate({"prompt_token_ids": token_ids, **images}, GREEDY)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_an_aborted_request_lets_go_of_its_images(plain, expected, num_steps):
    engine, finished = plain.llm_engine, {}
    engine.add_request("aborted", requests_of()[3], GREEDY)
    engine.add_request("kept", requests_of()[1], GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort_request(["aborted"])
    while engine.has_unfinished_requests():
        finished.update((each.request_id, each) for each in engine.step() if each.finished)
    assert tokens_of([finished["kept"]]) == [expected[1]]
    assert not scheduler_of(plain).media.holders


@pytest.mark.parametrize("name", ["ct-w8a8", "bnb-nf4"])
def test_a_quantized_language_model_has_a_dense_encoder(name, tmp_path):
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    source = make_tiny_images("llava", tmp_path / "dense", **sizes)
    for skipped in (("vision_tower", "multi_modal_projector"), ()):
        made = tmp_path / f"{len(skipped)} skipped"
        made.mkdir()
        stored, _ = write_quantized(name, made, source, skipped)
        for path in source.iterdir():
            if not (stored / path.name).exists():
                shutil.copy(path, stored)
        if skipped:
            llm = LLM(str(stored), **ENGINE)
            encoders = [
                worker_of(each).model.media_encoder for each in (LLM(str(source), **ENGINE), llm)
            ]
            dense, own = (dict(encoder.named_parameters()) for encoder in encoders)
            assert all(torch.equal(own[key], dense[key]) for key in dense)
            assert own.keys() == dense.keys()
            assert len(tokens_of(llm.generate(ask("<image>", IMAGE), GREEDY))[0]) == 12
            continue
        with pytest.raises(WeightLoadError, match=r"encoders are not read from quantized.*to 0$"):
            LLM(str(stored), **ENGINE)
        llm = LLM(str(stored), **ENGINE, limit_mm_per_prompt={"image": 0})
        assert len(tokens_of(llm.generate("No picture", GREEDY))[0]) == 12


def test_emptying_the_prefix_cache_drops_embeddings_of_images(folder):
    llm = LLM(str(folder), **ENGINE)

    def change(worker):
        for weight in worker.get_model().media_encoder.parameters():
            weight.data.mul_(1.7)

    before = tokens_of(llm.generate(requests_of(), GREEDY))
    llm.collective_rpc(change)
    assert llm.reset_prefix_cache()
    changed = tokens_of(llm.generate(requests_of(), GREEDY))
    unchanged = [i for i in range(len(before)) if before[i] == changed[i]]
    assert unchanged == [2], "of the prompt without an image"


def test_events_of_the_cache_tell_images_apart(folder):
    llm = LLM(str(folder), **ENGINE)
    events = log_cache_events(llm)
    text = "a <image><image> and more text, which fills blocks"
    one, two = IMAGE, draw_image(2, 32, 32)
    params = SamplingParams(max_tokens=1)

    def keys_of(*images, **others):
        (output,) = llm.generate(ask(text, *images, **others), params)
        stored = events.drain()
        token_ids = [token for event in stored for token in event.token_ids]
        assert token_ids == output.prompt_token_ids[: len(token_ids)]
        return [block for event in stored for block in event.extra_keys]

    first, second, third, *rest = keys_of(one, two)
    ((one_key, begin),) = first
    assert begin == 2 and second[0] == (one_key, -14)
    two_key = second[1][0]
    assert second[1:] == [(two_key, 2)] and third == [(two_key, -14)]
    assert len({one_key, two_key, "0" * len(one_key)}) == 3 and int(one_key, 16)
    assert len(one_key) == 64 and rest == [None]
    other, *_ = keys_of(two, one)
    assert other == [(two_key, 2)]
    salted, *_ = keys_of(one, two, cache_salt="salt")
    assert salted[0][0] not in (one_key, two_key)
    llm.generate("No image, and enough text for a block", params)
    assert [event.extra_keys for event in events.drain()] == [None]
