"""Test logits processors that users pass in SamplingParams."""

import functools

import pytest
import torch

from tests.sample.helpers import make_request, make_state, rows, sample
from vllm.sample.sampler import Sampler

VOCAB_SIZE = 30


def greedy(processors, logits=None, output=(), **params):
    request = make_request(temperature=0.0, logits_processors=processors, **params)
    logits = torch.zeros(1, VOCAB_SIZE) if logits is None else logits
    return sample([request], logits, [output])


def force(token_id):
    def processor(output_ids, logits):
        logits[token_id] = 100.0
        return logits

    return processor


def test_a_processor_of_two_arguments_gets_output_and_logits():
    seen = []

    def processor(output_ids, logits):
        seen.append((list(output_ids), logits.shape, logits.dtype))
        return logits

    greedy([processor], torch.zeros(1, VOCAB_SIZE, dtype=torch.bfloat16), [4, 5], prompt=[1, 2])
    assert seen == [([4, 5], (VOCAB_SIZE,), torch.float32)]


def test_a_processor_of_three_arguments_gets_the_prompt_too():
    seen = []

    def processor(prompt_ids, output_ids, logits):
        seen.append((list(prompt_ids), list(output_ids)))
        return logits

    greedy([processor], output=[4, 5], prompt=[1, 2])
    assert seen == [([1, 2], [4, 5])]


class Callable3:
    def __call__(self, prompt_ids, output_ids, logits):
        return torch.where(torch.arange(len(logits)) == prompt_ids[0] + output_ids[0], 9.0, logits)

    def method2(self, output_ids, logits):
        return logits + torch.nn.functional.one_hot(torch.tensor(output_ids[0]), len(logits))


@pytest.mark.parametrize(
    ("processor", "token"),
    [
        (Callable3(), 11),
        (Callable3().method2, 4),
        (functools.partial(lambda scale, output, logits: logits + scale, 2.0), 0),
        (lambda output, logits, extra=3: logits.index_fill(0, torch.tensor([extra]), 5.0), 3),
        (lambda *args: args[-1].index_fill(0, torch.tensor([len(args)]), 5.0), 2),
    ],
)
def test_the_number_of_arguments_is_read_from_the_signature(processor, token):
    output = greedy([processor], output=[4], prompt=[7])
    assert not output.errors
    assert output.token_ids.item() == token


def test_processors_run_in_their_order_and_see_each_other():
    output = greedy([force(3), lambda output, logits: -logits, force(5)])
    assert output.token_ids.item() == 5
    assert greedy([force(3), lambda output, logits: -logits]).token_ids.item() == 0


def test_processors_come_before_bias_and_bans():
    processors = [force(3)]
    assert greedy(processors, bad_words=[[3]]).token_ids.item() == 0
    assert greedy(processors, logit_bias={7: 200.0}).token_ids.item() == 7
    assert greedy(processors, allowed_token_ids=[8]).token_ids.item() == 8


def test_output_grows_with_what_was_sampled():
    lengths = []

    def processor(output_ids, logits):
        lengths.append(len(output_ids))
        return logits

    state = make_state([make_request(logits_processors=[processor])], VOCAB_SIZE, [[1, 2, 3]])
    for step in range(3):
        output = Sampler()(torch.zeros(1, VOCAB_SIZE), state.metadata(rows(0), rows(3 + step)))
        state.record(rows(0), output.token_ids.numpy())
    assert lengths == [3, 4, 5]


def raises(output_ids, logits):
    logits.fill_(7.0)
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (raises, "raises raised KeyError: 'oops'"),
        (lambda output, logits: None, "must return a tensor of shape (20000,), got NoneType"),
        (
            lambda output, logits: logits[:5],
            "must return a tensor of shape (20000,), got shape (5,)",
        ),
        (lambda output, logits: logits[None], "got shape (1, 20000)"),
        (lambda output, logits: logits.tolist(), "got list"),
        (lambda: None, "TypeError"),
        (lambda a, b, c, d: None, "TypeError"),
    ],
)
@pytest.mark.parametrize("pass_elements", [None, 20_000])
def test_a_faulty_processor_fails_its_row_only(processor, message, pass_elements):
    logits = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(1))
    healthy = [make_request(seed=i) for i in range(4)]
    faulty = make_request(logits_processors=[force(3), processor])
    state = make_state([*healthy[:2], faulty, *healthy[2:]], 20_000)
    metadata = state.metadata(rows(0, 1, 2, 3, 4), rows(0, 0, 0, 0, 0))
    output = Sampler(pass_elements)(logits, metadata)
    assert output.errors.keys() == {2}
    assert message in output.errors[2]
    assert state.errors_of(rows(10, 11, 12, 13, 14), output) == {12: output.errors[2]}
    others = [0, 1, 3, 4]
    assert output.token_ids[others].equal(sample(healthy, logits[others]).token_ids)


def test_a_processor_may_return_another_dtype():
    output = greedy([lambda output, logits: force(6)(output, logits).double()])
    assert output.token_ids.item() == 6 and not output.errors


def test_logits_that_a_processor_keeps_are_its_own():
    kept = []

    def processor(output_ids, logits):
        kept.append(logits)
        return logits

    request = make_request(logits_processors=[processor])
    state = make_state([request], VOCAB_SIZE)
    sampler = Sampler()
    for value in (1.0, 2.0):
        sampler(torch.full((1, VOCAB_SIZE), value), state.metadata(rows(0), rows(0)))
    assert [logits[0].item() for logits in kept] == [1.0, 2.0]


def test_a_processor_that_changes_its_lists_harms_no_other_request():
    def greedy_hand(prompt_ids, output_ids, logits):
        prompt_ids.clear()
        output_ids.clear()
        return logits

    prompt, output = [1, 2], [3, 4]
    request = make_request(prompt=prompt, logits_processors=[greedy_hand])
    sample([request], torch.zeros(1, VOCAB_SIZE), [output])
    assert request.prompt_token_ids == [1, 2] and output == [3, 4]
