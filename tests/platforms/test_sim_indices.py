"""Test indices outside of a tensor: a card skips them, and a strict simulated card raises an
error.
"""

import pytest
import torch

from gaudi_sim.bridge import SimBridge

OUTSIDE = [-1, 5, 1000]


def on_card(*values: float) -> torch.Tensor:
    return torch.tensor(values).to("hpu")


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("dim", [0, 1])
def test_reading_skips_them(eager, dim, outside):
    x = torch.arange(1.0, 26).view(5, 5)
    out = x.to("hpu").index_select(dim, on_card(3, outside, 0)).cpu()
    expected = x.index_select(dim, torch.tensor([3, 0, 0]))
    expected.select(dim, 1).zero_()
    assert out.equal(expected)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("dim", [0, 1])
def test_writing_skips_them(eager, dim, outside):
    x = torch.zeros(5, 5, device="hpu")
    ones = torch.ones(5, 3) if dim else torch.ones(3, 5)
    x.index_copy_(dim, on_card(1, outside, 4), ones.to("hpu"))
    expected = torch.zeros(5, 5)
    expected.index_fill_(dim, torch.tensor([1, 4]), 1)
    assert x.cpu().equal(expected)


def test_a_replay_skips_those_of_its_own_input(lazy):
    class Row(torch.nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, index)

    wrapped, x = lazy.wrap_in_hpu_graph(Row()), on_card(7.0, 8.0)
    with torch.inference_mode():
        rows = [wrapped(x, on_card(index, 1)).tolist() for index in (0, -1, 2, 1)]
    assert rows == [[7, 8], [0, 8], [0, 8], [8, 8]]


def test_strict_says_which_are_outside(strict):
    x = torch.zeros(5, 2, device="hpu")
    with pytest.raises(IndexError, match=r"from 0 to 4 in this dimension, got \[-1, 5\]"):
        x.index_select(0, on_card(2, -1, 5))
    with pytest.raises(IndexError, match=r"\[7\]"):
        x.index_copy_(0, on_card(7), torch.ones(1, 2).to("hpu"))


@pytest.mark.parametrize("is_strict", [False, True])
def test_negative_ones_in_brackets_are_refused_in_strict_mode_only(is_strict):
    SimBridge("gaudi2", is_strict=is_strict)
    x, last = on_card(1.0, 2.0, 3.0), on_card(-1)
    if not is_strict:
        x[last] += 1
        assert x[last].tolist() == [4]
        return
    for use in (lambda: x[last], lambda: x.index_put_((last,), on_card(0.0))):
        with pytest.raises(IndexError, match="does not count them from the end"):
            use()
    assert x[on_card(2)].tolist() == x[-1:].tolist() == [3]


def test_other_mistakes_are_errors_as_ever(eager):
    x = torch.zeros(5, 2, device="hpu")
    with pytest.raises(IndexError, match="vector"):
        x.index_select(0, torch.zeros(2, 2, dtype=torch.int64).to("hpu"))
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.index_select(7, on_card(1))
