"""Test packed masks, and the threads that fill them."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gaudi_sim.bridge import SimBridge
from tests.sample.helpers import CPU, make_request, make_state, repeatable, rows
from vllm.sample.restrictions.masks import (
    MaskFiller,
    TokenMasks,
    bit_values,
    num_words,
    pack_allowed,
)
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState


class FakeMatcher:
    """Allows one token after another. It can wait and fail."""

    def __init__(self, vocab_size: int, first: int = 0) -> None:
        self.vocab_size, self.next = vocab_size, first
        self.error: str | None = None
        self.may_fill = threading.Event()
        self.may_fill.set()
        self.thread = ""

    def fill(self, mask: np.ndarray) -> None:
        assert self.may_fill.wait(120)
        self.thread = threading.current_thread().name
        mask[:] = pack_allowed([self.next], self.vocab_size)

    def fill_along(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        self.fill(masks[0])
        for place, _ in enumerate(drafts, 1):
            masks[place] = pack_allowed([(self.next + place) % self.vocab_size], self.vocab_size)

    def accept(self, token_id: int) -> None:
        assert token_id == self.next
        self.next = (self.next + 1) % self.vocab_size


@pytest.mark.parametrize("device", ["cpu", "sim"])
@repeatable
@given(st.data())
def test_a_mask_forbids_all_but_its_tokens(device, data):
    vocab_size = data.draw(st.sampled_from([1, 31, 32, 33, 130]))
    allowed = data.draw(
        st.lists(st.sets(st.integers(0, vocab_size - 1), min_size=1), min_size=1, max_size=4)
    )
    n = len(allowed) + 2
    places = np.array(data.draw(st.permutations(range(n))))[: len(allowed)]
    words = np.stack([pack_allowed(sorted(a), vocab_size) for a in allowed])
    with torch.inference_mode():
        where = CPU if device == "cpu" else SimBridge("gaudi2", is_lazy=False).device
        masks = TokenMasks(places, torch.from_numpy(words).to(where), bit_values(where))
        logits = torch.zeros(n, (vocab_size // 128 + 1) * 128).to(where)
        masks.apply(logits)
        found = logits.cpu()
    for row in range(n):
        kept = set(np.flatnonzero(found[row].numpy() == 0).tolist())
        index = places.tolist().index(row) if row in places else None
        if index is None:
            assert len(kept) == logits.shape[1]
        else:
            assert {t for t in kept if t < 32 * num_words(vocab_size)} == allowed[index]


def test_masks_of_some_rows_keep_their_places():
    words = np.stack([pack_allowed([t], 40) for t in range(3)])
    masks = TokenMasks(np.array([1, 4, 6]), torch.from_numpy(words), bit_values(CPU))
    some = masks.select(np.array([0, 4, 6]))
    assert some is not None
    assert some.rows.tolist() == [1, 2]
    assert some.words[:, 0].tolist() == [2, 4]
    assert masks.select(np.array([0, 2])) is None


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masks_are_filled_in_other_threads_and_waited_for(num_threads):
    filler = MaskFiller(40, 50, num_threads)
    matchers = [FakeMatcher(50, first=row) for row in range(40)]
    for row in range(0, 40, 2):
        filler.add(row, matchers[row])
    matchers[4].may_fill.clear()
    filler.start(rows(*range(40)))
    threading.Timer(0.05, matchers[4].may_fill.set).start()
    for row in range(0, 40, 2):
        assert filler.masks(row, {}).tolist() == [pack_allowed([row], 50).tolist()]
        assert matchers[row].thread.startswith("token-masks")
    filler.masks(0, {})
    assert matchers[0].thread == threading.current_thread().name, "what nobody started"
    filler.start(rows(0, 2))
    filler.remove(0)
    assert 0 not in filler and 2 in filler


@pytest.mark.parametrize("static_shapes", [False, True])
def test_rows_with_a_matcher_take_its_tokens_and_the_others_are_free(static_shapes):
    state = SamplingState(4, 50, CPU, static_shapes=static_shapes)
    state.add(0, make_request(temperature=0.0), [])
    state.add(1, make_request(temperature=0.0), [], FakeMatcher(50, first=7))
    state.add(2, make_request(temperature=0.0, allowed_token_ids=[20, 21]), [])
    state.add(3, make_request(temperature=0.0), [], FakeMatcher(50, first=30))
    logits = torch.zeros(4, 50)
    logits[:, 44] = 5
    order, tokens = rows(0, 1, 2, 3), []
    sampler = Sampler(pass_elements=None if static_shapes else 100)
    for step in range(3):
        state.start_masks(order)
        output = sampler(logits, state.metadata(order, np.full(4, step, np.int32)))
        tokens.append(output.token_ids.tolist())
        state.record(order, output.token_ids.numpy())
    assert tokens == [[44, 7, 20, 30], [44, 8, 20, 31], [44, 9, 20, 32]]
    state.remove(1)
    state.add(1, make_request(temperature=0.0), [])
    output = sampler(logits, state.metadata(order, np.zeros(4, np.int32)))
    assert output.token_ids.tolist() == [44, 44, 20, 33]


@pytest.mark.parametrize("static_shapes", [False, True])
def test_masks_of_a_row_with_drafts_are_those_behind_them(static_shapes):
    state = SamplingState(2, 50, CPU, static_shapes=static_shapes)
    state.add(0, make_request(temperature=0.0), [], FakeMatcher(50, first=7))
    state.add(1, make_request(temperature=0.0), [], FakeMatcher(50, first=30))
    sampler = Sampler(pass_elements=None if static_shapes else 100)
    drafts = {0: [7, 8]}
    state.start_masks(rows(0, 1), drafts)
    order = rows(0, 0, 0, 1)
    output = sampler(torch.zeros(4, 50), state.metadata(order, rows(0, 1, 2, 0), None, drafts))
    assert output.token_ids.tolist() == [7, 8, 9, 30]


def test_a_matcher_that_fails_is_an_error_of_its_row():
    state, matcher = make_state([make_request()], 50, static_shapes=False), FakeMatcher(50)
    state.remove(0)
    state.add(0, make_request(), [], matcher)
    matcher.error = "it broke"
    output = Sampler()(torch.zeros(1, 50), state.metadata(rows(0), rows(0)))
    assert state.errors_of(rows(0), output) == {0: "it broke"}
