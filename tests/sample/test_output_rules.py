"""Test the rules of a model for its outputs against the logits processors of transformers."""

import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from gaudi_sim.bridge import SimBridge
from tests.exhaustive import seeds
from vllm.message_codec import decoder, encode_array
from vllm.messages import EngineRequest, OutputRules
from vllm.sample.cpu_sampler import CPUSampler, make_sampler
from vllm.sample.metadata import SamplingMetadata
from vllm.sample.restrictions.output_rules import RowRules
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState
from vllm.sample.warmup import stages_of
from vllm.sampling_params import SamplingParams

VOCAB, END, FIRST_TIME, NUM_TIMES, MAX_FIRST = 150, 80, 90, 60, 20
NO_TIMES = FIRST_TIME - 1
NEVER, NOT_FIRST = (3, 5, 85), (7, END)
WITHOUT_TIMES = OutputRules(never=NEVER, not_first=NOT_FIRST, end=END)
WITH_TIMES = OutputRules(
    never=(*NEVER, NO_TIMES),
    not_first=NOT_FIRST,
    end=END,
    first_time=FIRST_TIME,
    end_of_times=VOCAB,
    end_of_first_times=FIRST_TIME + MAX_FIRST + 1,
)


def make_state(num_rows=4):
    return SamplingState(num_rows, VOCAB, torch.device("cpu"))


def make_request(rules, **params):
    return EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(**params),
        seed=0,
        eos_token_id=END,
        max_total_tokens=100,
        arrival_time=0.0,
        output_rules=rules,
    )


def expected_logits(logits, output, has_times):
    """Return the logits [V] after the processors that `generate` uses for Whisper."""
    config = SimpleNamespace(
        forced_decoder_ids=None,  # older releases ask for it
        no_timestamps_token_id=NO_TIMES,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=MAX_FIRST,
    )
    ids = torch.tensor([[0, *output]])
    x = SuppressTokensAtBeginLogitsProcessor(list(NOT_FIRST), 1)(ids, logits[None])
    x = SuppressTokensLogitsProcessor(list(NEVER))(ids, x)
    return WhisperTimeStampLogitsProcessor(config, 1)(ids, x)[0] if has_times else x[0]


def random_output(rng):
    """Return text with time stamps in an order that the rules allow, or the start of such a
    text.
    """
    output, time = [FIRST_TIME + rng.randint(0, 5)], 5
    for _ in range(rng.randint(0, 3)):
        output += rng.choices(range(40), k=rng.randint(1, 3))
        time += rng.randint(1, 6)
        output.append(FIRST_TIME + time)
        if rng.random() < 0.7:
            output.append(FIRST_TIME + time)
    return output[: rng.randint(0, len(output))]


@pytest.mark.parametrize("seed", seeds(15, 40))
def test_the_logits_of_a_batch_are_those_of_transformers(seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    state = make_state()
    outputs = [random_output(rng) for _ in range(4)]
    logits = torch.randn(4, VOCAB, generator=generator)
    # With this offset, text is chosen at some positions and time stamps at others.
    logits[:, FIRST_TIME:] -= 2.5
    kinds = [WITH_TIMES, WITHOUT_TIMES, None, WITH_TIMES]
    for row, (output, rules) in enumerate(zip(outputs, kinds, strict=True)):
        known = rng.randint(0, len(output))
        state.add(row, make_request(rules), output[:known])
        for token in output[known:]:
            state.record(np.array([row], np.int32), np.array([token], np.int32))
    rows = np.arange(4, dtype=np.int32)
    num_output = np.array([len(output) for output in outputs], np.int32)
    metadata = state.metadata(rows, num_output)
    found = metadata.rules.apply(logits)
    for row, (output, rules) in enumerate(zip(outputs, kinds, strict=True)):
        expected = logits[row]
        if rules is not None:
            expected = expected_logits(expected, output, rules is WITH_TIMES)
        assert torch.equal(found[row], expected), (row, output)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("sampler_type", [Sampler, CPUSampler])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_and_log_probabilities_follow_the_rules(sampler_type, dtype):
    state, sampler = make_sampler(3, VOCAB, torch.device("cpu"))
    if sampler_type is Sampler:
        state, sampler = make_state(3), Sampler()
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[:, 7] = 20  # this token is forbidden at the start
    state.add(0, make_request(WITHOUT_TIMES, temperature=0, logprobs=2), [])
    state.add(1, make_request(None, temperature=0, logprobs=2), [])
    state.add(2, make_request(WITH_TIMES, temperature=1.0, logprobs=2), [])
    rows = np.arange(3, dtype=np.int32)
    output = sampler(logits, state.metadata(rows, np.zeros(3, np.int32)))
    tokens = output.token_ids.tolist()
    assert tokens[0] != 7 and tokens[1] == 7
    assert FIRST_TIME <= tokens[2] <= FIRST_TIME + MAX_FIRST
    for row, has_times in ((0, False), (2, True)):
        expected = expected_logits(logits[row].float(), [], has_times).log_softmax(-1)
        ids, logprobs = output.logprobs.token_ids[row], output.logprobs.logprobs[row]
        assert torch.allclose(logprobs, expected[ids.long()], atol=1e-5)
    state.remove(2)
    assert state.metadata(rows[1:2], np.zeros(1, np.int32)).rules is None


@torch.inference_mode()
def test_a_card_forbids_the_same_tokens():
    bridge = SimBridge("gaudi2", is_lazy=True, is_strict=True)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, VOCAB, generator=generator)
    logits[:, FIRST_TIME:] -= 2.5
    card = SamplingState(4, VOCAB, bridge.device, static_shapes=True)
    host = make_state(4)
    outputs = [[FIRST_TIME, 4], [], [FIRST_TIME, 4, 6]]
    for row, rules in enumerate((WITH_TIMES, WITHOUT_TIMES, WITH_TIMES)):
        for state in (card, host):
            state.add(row, make_request(rules, temperature=0), outputs[row])
    rows, num_output = np.arange(3, dtype=np.int32), np.array([2, 0, 3], np.int32)
    found = card.metadata(rows, num_output, padded_size=4)
    assert ("rules", 4, True) in stages_of(found)
    expected = host.metadata(rows, num_output).rules.apply(logits)
    assert torch.equal(found.rules.apply(logits.to(bridge.device)).cpu(), expected)
    sampler = Sampler(pass_elements=None, end_stage=bridge.mark_step)
    tokens = sampler(logits.to(bridge.device), found).token_ids.cpu()
    assert tokens[:3].tolist() == expected[:3].argmax(-1).tolist()


def test_known_masks_forbid_what_follows_the_output():
    """A decode step that runs in one call reads these masks for all tokens but the first."""
    state = make_state()
    rows = np.arange(4, dtype=np.int32)
    state.add(0, make_request(WITHOUT_TIMES), [])
    state.add(1, make_request(WITH_TIMES), [FIRST_TIME])
    state.add(2, make_request(None, allowed_token_ids=[4, 149]), [])
    state.add(3, make_request(None), [])
    state.record(rows[1:2], np.array([4], np.int32))
    for output in ([FIRST_TIME, 4], [FIRST_TIME, 4, FIRST_TIME + 9]):
        state.update_masks(rows)
        bits = np.unpackbits(state.row_arrays.masks.view(np.uint8), axis=1, bitorder="little")
        allowed = [set(np.flatnonzero(row[:VOCAB]).tolist()) for row in bits]
        rules = RowRules(WITH_TIMES, output, VOCAB).allowed(len(output)).view(np.uint8)
        expected = np.flatnonzero(np.unpackbits(rules, bitorder="little")[:VOCAB]).tolist()
        assert allowed[:3] == [set(range(VOCAB)) - set(NEVER), set(expected), {4, 149}]
        state.record(rows[1:2], np.array([FIRST_TIME + 9], np.int32))
    assert (state.row_arrays.first_times == FIRST_TIME).nonzero()[0].tolist() == [1]
    state.remove(1)
    assert (state.row_arrays.first_times > VOCAB).all()


def test_drafts_are_followed():
    rules = RowRules(WITH_TIMES, [FIRST_TIME, 4], VOCAB)

    def allowed(ahead):
        bits = np.unpackbits(rules.allowed(2 + len(ahead), ahead).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits[:VOCAB]).tolist())

    text, times = set(range(FIRST_TIME)) - {*NEVER, NO_TIMES}, range(FIRST_TIME, VOCAB)
    assert allowed([]) == text | set(times[1:])
    assert allowed([FIRST_TIME + 9]) == {t for t in text if t >= END} | set(times[9:])
    assert allowed([FIRST_TIME + 9, FIRST_TIME + 9]) == text
    assert allowed([6]) == text | set(times[1:])


def test_tokens_of_the_prompt_may_begin_the_output():
    written = OutputRules(never=NEVER, not_first=NOT_FIRST, written=(4,))
    state = make_state(1)
    state.add(0, make_request(written), [])
    metadata = state.metadata(np.zeros(1, np.int32), np.zeros(1, np.int32))
    logits = metadata.rules.apply(torch.zeros(1, VOCAB))
    assert logits[0, 7] == 0 and torch.isinf(logits[0, list(NEVER)]).all()


def test_only_time_stamps_make_the_engine_wait_for_tokens():
    assert make_request(WITH_TIMES).follows_output
    assert not make_request(WITHOUT_TIMES).follows_output
    state = make_state(2)
    state.add(0, make_request(WITHOUT_TIMES), [])
    state.add(1, make_request(WITH_TIMES), [])
    assert not state.follows_output(np.array([0], np.int32))
    assert state.follows_output(np.array([1], np.int32))


def test_rules_reach_another_process():
    request = make_request(WITH_TIMES)
    data = msgspec.msgpack.encode(request, enc_hook=encode_array)
    assert decoder(EngineRequest).decode(data).output_rules == WITH_TIMES


def test_requests_without_rules_have_no_metadata_of_them():
    state = make_state(1)
    state.add(0, make_request(None, temperature=0), [])
    metadata = state.metadata(np.zeros(1, np.int32), np.zeros(1, np.int32))
    assert metadata == SamplingMetadata()
