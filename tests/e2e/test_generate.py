"""Test the public interface with the bundled model: correct use and mistakes."""

import math
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.reach import core_of, pool_of
from tests.tiny_models import LOAD_FLOAT32
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.errors import RequestError
from vllm.sampling_params import BeamSearchParams

PROMPTS = ["import os\n", "def main(", "class Queue:\n    def", "# A comment about", "x = ["]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_model_len=256, num_gpu_blocks_override=300, max_num_seqs=32)


def tokens_of(outputs) -> list[list[int]]:
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def assert_still_serves(llm: LLM) -> None:
    output = llm.generate("import", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output[0].outputs[0].token_ids) == 3
    pool = pool_of(llm)
    assert pool.num_free == pool.num_usable_blocks


def test_outputs_come_in_the_order_of_the_prompts_with_growing_ids(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 3, 7)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5, 3, 7]
    ids = [int(o.request_id) for o in outputs]
    assert ids == sorted(ids) and all(o.finished for o in outputs)
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_text_is_what_the_tokenizer_makes_of_all_tokens(llm):
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=60)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        sample = output.outputs[0]
        whole = llm.get_tokenizer().decode(sample.token_ids, skip_special_tokens=True)
        assert sample.text == whole


def test_a_seeded_request_is_the_same_alone_and_in_a_crowd(llm):
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
    alone = tokens_of(llm.generate(PROMPTS[1], seeded, use_tqdm=False))[0]
    others = [
        SamplingParams(temperature=0.7, top_k=9, max_tokens=12, seed=5),
        seeded,
        SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.3),
        SamplingParams(temperature=1.5, min_p=0.1, max_tokens=5, presence_penalty=1.0),
        SamplingParams(max_tokens=20, logit_bias={7: 5.0}, logprobs=4),
    ]
    crowd = tokens_of(llm.generate(PROMPTS, others, use_tqdm=False))[1]
    assert crowd == alone
    assert tokens_of(llm.generate(PROMPTS[1], seeded, use_tqdm=False))[0] == alone


def test_samples_of_one_prompt_differ_and_reproduce(llm):
    params = SamplingParams(n=4, temperature=1.0, seed=2, max_tokens=16, ignore_eos=True)
    first = tokens_of(llm.generate(PROMPTS[0], params, use_tqdm=False))
    assert len({tuple(tokens) for tokens in first}) == 4
    assert tokens_of(llm.generate(PROMPTS[0], params, use_tqdm=False)) == first


def test_the_best_of_several_samples_are_those_with_the_highest_probability(llm):
    wanted = {"temperature": 1.3, "seed": 5, "max_tokens": 8}
    (every,) = llm.generate(PROMPTS[1], SamplingParams(n=5, logprobs=0, **wanted), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda sample: sample.cumulative_logprob, reverse=True)
    (best,) = llm.generate(PROMPTS[1], SamplingParams(n=2, best_of=5, **wanted), use_tqdm=False)
    assert [s.token_ids for s in best.outputs] == [s.token_ids for s in ranked[:2]]
    assert [s.index for s in best.outputs] == [0, 1]
    assert [s.cumulative_logprob for s in best.outputs] == pytest.approx(
        [s.cumulative_logprob for s in ranked[:2]]
    )
    assert best.outputs[0].logprobs is None
    assert_still_serves(llm)


def test_a_stop_string_ends_the_text_before_it(llm):
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = llm.generate(PROMPTS[2], free, use_tqdm=False)[0].outputs[0].text
    stop = text[7:12]
    params = SamplingParams(temperature=0, max_tokens=40, stop=[stop], ignore_eos=True)
    sample = llm.generate(PROMPTS[2], params, use_tqdm=False)[0].outputs[0]
    assert sample.text == text[: text.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert len(sample.token_ids) < 40
    assert_still_serves(llm)


def test_a_stop_token_is_kept_in_the_tokens_and_reported(llm):
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, min_tokens=0)
    tokens = tokens_of(llm.generate(PROMPTS[3], free, use_tqdm=False))[0]
    stop = tokens[4]
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True)
    sample = llm.generate(PROMPTS[3], params, use_tqdm=False)[0].outputs[0]
    assert list(sample.token_ids) == tokens[: tokens.index(stop) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


def test_a_second_request_finds_the_prefix_of_the_first(llm):
    llm.reset_prefix_cache()
    prompt = "# shared beginning of two requests\n" * 8
    params = SamplingParams(temperature=0, max_tokens=4)
    first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens and second.num_cached_tokens >= 32
    assert tokens_of([first]) == tokens_of([second])


def test_prefixes_are_not_shared_between_cache_salts(llm):
    llm.reset_prefix_cache()
    text = "# the same beginning for both tenants\n" * 8
    params = SamplingParams(temperature=0, max_tokens=2)
    outputs = [
        llm.generate({"prompt": text, "cache_salt": salt}, params, use_tqdm=False)[0]
        for salt in ("tenant a", "tenant b", "tenant a")
    ]
    hits = [output.num_cached_tokens for output in outputs]
    assert hits[0] == 0 and hits[1] == 0 and hits[2] > 0


def test_chat_answers_every_conversation_without_a_second_bos(llm):
    conversations = [
        [{"role": "user", "content": "What does os.path.join do?"}],
        [{"role": "user", "content": [{"type": "text", "text": "What does re.match do?"}]}],
    ]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    bos = llm.get_tokenizer().bos_token_id
    assert len(outputs) == 2
    assert all(output.prompt_token_ids.count(bos) == 1 for output in outputs)


def test_a_failing_logits_processor_ends_its_own_request_only(llm):
    def broken(output_ids, logits):
        if len(output_ids) == 2:
            raise KeyError("my own bug")
        return logits

    bad = SamplingParams(temperature=0, max_tokens=8, logits_processors=[broken])
    good = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:3], [good, bad, good], use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length"]
    assert "my own bug" in str(outputs[1].outputs[0].stop_reason)
    assert_still_serves(llm)


def test_a_logits_processor_decides_what_is_sampled(llm):
    def only_five(prompt_ids, output_ids, logits):
        assert prompt_ids
        return torch.full_like(logits, -math.inf).index_fill(0, torch.tensor([5]), 0.0)

    params = SamplingParams(max_tokens=4, ignore_eos=True, logits_processors=[only_five])
    assert tokens_of(llm.generate(PROMPTS[0], params, use_tqdm=False)) == [[5, 5, 5, 5]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "", "add_special_tokens": False}, "prompt is empty"),
        ({"prompt_token_ids": []}, "no tokens"),
        ({"prompt_token_ids": [5] * 300}, "300 tokens"),
        ({"prompt_token_ids": [5, 4096]}, "4096"),
        ({"prompt_token_ids": [5, -1]}, "-1"),
        ({"prompt_token_ids": "5"}, "str"),
        (17, "int"),
        ({"text": "no"}, "prompt"),
        (None, "None"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_lost(llm, prompt, message):
    with pytest.raises(ValueError, match=message) as caught:
        llm.generate(["import", prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    assert "prompt 1 of 2" in str(caught.value) and "\n" not in str(caught.value)
    assert not llm.llm_engine.has_unfinished_requests()
    assert_still_serves(llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"logit_bias": {99999: 1.0}}, "logit_bias"),
    ],
)
def test_a_bad_parameter_is_named(llm, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate("import", SamplingParams(**params), use_tqdm=False)
    assert_still_serves(llm)


def test_parameters_must_match_the_prompts(llm):
    with pytest.raises(ValueError, match="one entry for each of the 3 prompts, got 2"):
        llm.generate(PROMPTS[:3], [SamplingParams()] * 2, use_tqdm=False)


def test_ctrl_c_in_the_middle_of_a_step_leaves_a_usable_engine(llm, monkeypatch):
    core = core_of(llm)
    execute, calls = core.executor.execute_model, []

    def interrupted(step):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return execute(step)

    monkeypatch.setattr(core.executor, "execute_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert len(calls) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    assert_still_serves(llm)


def test_requests_can_come_and_go_at_any_step(llm):
    engine = llm.llm_engine
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine.add_request("stays", PROMPTS[0], SamplingParams(temperature=0, max_tokens=12))
    engine.add_request("goes", PROMPTS[1], long)
    finished = {}
    for count in range(200):
        if count == 4:
            engine.add_request("late", PROMPTS[2], SamplingParams(temperature=0, max_tokens=6))
            assert [o.outputs[0].finish_reason for o in engine.abort_request("goes")] == ["abort"]
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        if not engine.has_unfinished_requests():
            break
    assert set(finished) == {"stays", "late"}
    with pytest.raises(RequestError):
        engine.add_request("bad", [], long)
    assert_still_serves(llm)


def test_a_duplicate_request_id_is_refused_and_the_first_goes_on(llm):
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add_request("same", PROMPTS[0], params)
    with pytest.raises(ValueError, match="same"):
        engine.add_request("same", PROMPTS[1], params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [o for o in engine.step() if o.finished]
    assert [o.request_id for o in outputs] == ["same"] and outputs[0].prompt == PROMPTS[0]


def test_important_requests_finish_first_under_the_priority_policy():
    llm = LLM(
        dtype="float32",
        max_model_len=128,
        max_num_seqs=1,
        num_gpu_blocks_override=50,
        scheduling_policy="priority",
    )
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for name, priority in (("low", 9), ("middle", 5), ("high", 1)):
        engine.add_request(name, PROMPTS[0], params, priority=priority)
    order = []
    while engine.has_unfinished_requests():
        order += [o.request_id for o in engine.step() if o.finished]
    assert order == ["high", "middle", "low"]


def plain_beam_search(prompt: list[int], width: int, steps: int) -> list[tuple[float, list[int]]]:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, **LOAD_FLOAT32).eval()
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(steps):
        longer = []
        for score, tokens in beams:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
            best = logits.log_softmax(-1).topk(2 * width)
            for logprob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                longer.append((score + logprob, [*tokens, token]))
        beams = sorted(longer, reverse=True)[:width]
    return beams


def test_beam_search_finds_the_beams_of_a_plain_search(llm):
    prompt = llm.get_tokenizer()(PROMPTS[0])["input_ids"]
    want = plain_beam_search(prompt, width=3, steps=5)
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    found = llm.beam_search([PROMPTS[0]], params)[0].sequences
    assert [sequence.tokens[len(prompt) :] for sequence in found] == [b[1] for b in want]
    for sequence, (score, _) in zip(found, want, strict=True):
        assert sequence.cum_logprob == pytest.approx(score, abs=1e-3)
