"""Test beam search against trying every sequence."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.loops import loop_over
from vllm.entrypoints.shared.beam_search import check_beam_width, search_beams
from vllm.errors import RequestError
from vllm.outputs import Logprob
from vllm.sampling_params import BeamSearchParams

VOCAB, END, PROMPT = 4, 3, [0]


class BigramModel:
    """Returns log-probabilities of the next token that depend only on the last token."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.table = []
        for _ in range(VOCAB):
            weights = [rng.random() ** 4 + 0.001 for _ in range(VOCAB)]
            self.table.append([math.log(weight / sum(weights)) for weight in weights])
        self.num_steps = 0

    def run(self, prompts, params, _):
        self.num_steps += 1
        assert params.max_tokens == 1
        return [self._output(prompt["prompt_token_ids"][-1], params.logprobs) for prompt in prompts]

    def _output(self, last, num_top):
        row = self.table[last]
        likeliest = sorted(range(VOCAB), key=row.__getitem__, reverse=True)[:num_top]
        entries = {token_id: Logprob(row[token_id]) for token_id in likeliest}
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[entries], stop_reason=None)])

    def score(self, output, length_penalty):
        steps = itertools.pairwise([*PROMPT, *output])
        return sum(self.table[a][b] for a, b in steps) / len(output) ** length_penalty


def search(model, params, end_tokens=frozenset({END}), max_model_len=100):
    (result,) = search_beams(
        [{"prompt_token_ids": PROMPT}],
        params,
        model.run,
        end_tokens=end_tokens,
        max_model_len=max_model_len,
        tokenizer=None,
    )
    return result.sequences


@loop_over("seed", range(8))
@loop_over("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_sequences(seed, length_penalty):
    model, max_tokens = BigramModel(seed), 4
    open_tokens = [token_id for token_id in range(VOCAB) if token_id != END]
    everything = [
        [*body, END]
        for length in range(max_tokens)
        for body in itertools.product(open_tokens, repeat=length)
    ] + [list(body) for body in itertools.product(open_tokens, repeat=max_tokens)]
    want = sorted((model.score(output, length_penalty) for output in everything), reverse=True)
    params = BeamSearchParams(
        beam_width=81,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        include_stop_str_in_output=True,
    )
    found = search(model, params)
    assert [model.score(b.tokens[1:], length_penalty) for b in found] == pytest.approx(want[:81])


def search_to_the_end(model, width, max_tokens, length_penalty):
    """Run the same search without stopping early. Return the outputs without the prompt."""
    live, done = [([], 0.0)], []
    for _ in range(max_tokens):
        grown = [
            ([*output, token_id], total + logprob)
            for output, total in live
            for token_id, logprob in enumerate(model.table[[*PROMPT, *output][-1]])
        ]
        done += [beam for beam in grown if beam[0][-1] == END]
        going_on = [beam for beam in grown if beam[0][-1] != END]
        live = sorted(going_on, key=lambda beam: beam[1], reverse=True)[:width]
    scored = [(total / len(output) ** length_penalty, output) for output, total in done + live]
    return [output for _, output in sorted(scored, reverse=True)[:width]]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_stopping_early_does_not_change_the_result(length_penalty):
    params = BeamSearchParams(
        beam_width=2,
        max_tokens=12,
        length_penalty=length_penalty,
        include_stop_str_in_output=True,
    )
    for seed in range(40):
        found = [beam.tokens[1:] for beam in search(BigramModel(seed), params)]
        assert found == search_to_the_end(BigramModel(seed), 2, 12, length_penalty), seed


def test_the_search_stops_when_no_beam_can_get_among_the_best_any_more():
    model = BigramModel(0)
    search(model, BeamSearchParams(beam_width=2, max_tokens=1000, length_penalty=0.0))
    assert model.num_steps < 50


def test_one_beam_is_greedy_search():
    model = BigramModel(1)
    (beam,) = search(model, BeamSearchParams(beam_width=1, max_tokens=5), end_tokens=frozenset())
    last, want = PROMPT[0], list(PROMPT)
    for _ in range(5):
        last = max(range(VOCAB), key=model.table[last].__getitem__)
        want.append(last)
    assert beam.tokens == want
    assert beam.finish_reason == "length"
    assert len(beam.logprobs) == 5


def test_an_end_token_is_left_out_unless_asked_for_and_named_as_stop_reason():
    def ended_beams(**options):
        params = BeamSearchParams(beam_width=20, max_tokens=3, **options)
        return [b for b in search(BigramModel(2), params) if b.finish_reason == "stop"]

    ended, kept = ended_beams(), ended_beams(include_stop_str_in_output=True)
    assert ended
    assert [[*b.tokens, END] for b in ended] == [b.tokens for b in kept]
    assert all(b.stop_reason == END for b in ended)


def test_sequences_end_at_max_model_len():
    params = BeamSearchParams(beam_width=2, max_tokens=50)
    beams = search(BigramModel(3), params, end_tokens=frozenset(), max_model_len=6)
    assert [len(beam.tokens) for beam in beams] == [6, 6]


@pytest.mark.parametrize("length_penalty", [1e4, -1e4, 1e308, -1e308, 5e-324, -0.0])
def test_every_finite_length_penalty_orders_sequences_by_their_score(length_penalty):
    params = BeamSearchParams(
        beam_width=81, max_tokens=4, length_penalty=length_penalty, include_stop_str_in_output=True
    )
    found = search(BigramModel(1), params)
    lengths = [len(beam.logprobs) for beam in found]
    sums = [beam.cum_logprob for beam in found]
    if abs(length_penalty) < 1:
        assert sums == sorted(sums, reverse=True)
    else:  # the length decides the order; beams of equal length are ordered by their sums
        is_long_better = length_penalty > 0
        assert lengths == sorted(lengths, reverse=is_long_better)
        for length in set(lengths):
            own = [beam.cum_logprob for beam in found if len(beam.logprobs) == length]
            assert own == sorted(own, reverse=True)


class LadderModel:
    """A model in which the first token determines the length and the total log-probability of an
    output.
    """

    def __init__(self, sums):
        self.sums = sums

    def run(self, prompts, params, _):
        outputs = []
        for prompt in prompts:
            output = prompt["prompt_token_ids"][1:]
            if not output:  # the beam with token 2 + n ends after n more tokens
                row = {2 + n: Logprob(0.0) for n in range(len(self.sums))}
            elif len(output) <= output[0] - 2:
                row = {1: Logprob(0.0)}
            else:
                row = {0: Logprob(self.sums[output[0] - 2])}
            outputs.append(
                SimpleNamespace(outputs=[SimpleNamespace(logprobs=[row], stop_reason=None)])
            )
        return outputs


@given(
    sums=st.lists(st.floats(-1e4, 0) | st.just(-math.inf), min_size=2, max_size=6),
    length_penalty=st.floats(allow_nan=False, allow_infinity=False) | st.floats(-3, 3),
)
def test_beams_come_in_the_order_of_their_scores(sums, length_penalty):
    params = BeamSearchParams(
        beam_width=len(sums),
        max_tokens=20,
        length_penalty=length_penalty,
        include_stop_str_in_output=True,
    )
    (result,) = search_beams(
        [{"prompt_token_ids": PROMPT}],
        params,
        LadderModel(sums).run,
        end_tokens=frozenset({0}),
        max_model_len=100,
        tokenizer=None,
    )
    beams = result.sequences
    assert sorted(beam.tokens[1] - 2 for beam in beams) == list(range(len(sums)))
    for better, worse in itertools.pairwise(beams):
        try:
            high, low = (
                b.cum_logprob / float(len(b.logprobs)) ** length_penalty for b in (better, worse)
            )
        except (OverflowError, ZeroDivisionError):
            continue  # this formula cannot compute the scores, but the search still knows the order
        assert high >= low or math.isclose(high, low, rel_tol=1e-12)


def test_a_search_that_needs_too_many_log_probabilities_is_refused_in_its_own_words():
    check_beam_width(10, 20, name="n", limit="--max-logprobs")
    with pytest.raises(RequestError) as found:
        check_beam_width(128, 20, name="n", limit="--max-logprobs")
    assert str(found.value) == (
        "beam search with n = 128 needs 256 log-probabilities per token, and --max-logprobs is "
        "20: use n up to 10, or raise --max-logprobs to 256"
    )
    with pytest.raises(RequestError, match=r"max_logprobs is 1: raise max_logprobs to 2$"):
        check_beam_width(1, 1, name="beam_width", limit="max_logprobs")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1", None, True])
def test_a_length_penalty_that_is_no_finite_number_is_refused(value):
    with pytest.raises(RequestError, match=r"^length_penalty must be a"):
        BeamSearchParams(beam_width=1, max_tokens=1, length_penalty=value)


def test_beams_keep_all_of_their_prompt_but_its_text():
    model, seen = BigramModel(0), []

    def run(prompts, step, owners):
        seen.extend(prompts)
        return model.run(prompts, step, owners)

    search_beams(
        [{"prompt_token_ids": PROMPT, "prompt": "text", "cache_salt": "salt", "media": 5}],
        BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True),
        run,
        end_tokens=frozenset(),
        max_model_len=100,
        tokenizer=None,
    )
    assert len(seen) == 5
    for prompt in seen:
        assert prompt["prompt_token_ids"][: len(PROMPT)] == PROMPT
        others = {key: value for key, value in prompt.items() if key != "prompt_token_ids"}
        assert others == {"cache_salt": "salt", "media": 5}
