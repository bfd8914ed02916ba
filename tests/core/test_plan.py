import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.core.plan import Plan, share_budget


def shared(want: list[int], budget: int) -> list[int]:
    return share_budget(np.array(want, np.int32), budget).tolist()


@pytest.mark.parametrize(
    ("want", "budget", "expected"),
    [
        ([], 5, []),
        ([1, 4, 1], 6, [1, 4, 1]),
        ([9, 1, 1], 5, [3, 1, 1]),
        ([9, 9, 1], 5, [4, 0, 1]),
        ([2, 9, 2], 5, [2, 3, 0]),
        ([0, 9, 0, 1], 4, [0, 3, 0, 1]),
    ],
)
def test_decodes_come_first_then_the_others_in_their_order(want, budget, expected):
    assert shared(want, budget) == expected


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 40))
def test_the_budget_is_kept_and_used(want, extra):
    budget = sum(count == 1 for count in want) + extra
    take = shared(want, budget)
    assert sum(take) == min(sum(want), budget)
    assert all(0 <= got <= count for got, count in zip(take, want, strict=True))
    assert all(got == 1 for got, count in zip(take, want, strict=True) if count == 1)


def make_plan(rows: list[int], num_tokens: list[int], only_decodes: bool, has_idle: bool) -> Plan:
    return Plan(
        rows=np.array(rows, np.int32),
        num_tokens=np.array(num_tokens, np.int32),
        budget=10,
        block_rows=np.empty(0, np.int32),
        block_ids=[],
        only_decodes=only_decodes,
        has_idle=has_idle,
    )


def test_rows_without_tokens_are_left_out_and_single_tokens_go_first():
    plan = make_plan([5, 3, 8, 1], [4, 1, 0, 2], only_decodes=False, has_idle=True)
    plan.add_rows([7, 6], [1, 3])
    in_order, tokens, _ = plan.decodes_first()
    assert in_order.tolist() == [3, 7, 5, 1, 6]
    assert tokens.tolist() == [1, 1, 4, 2, 3]


def test_a_batch_that_only_decodes_is_passed_on_as_it_is():
    plan = make_plan([5, 3], [1, 1], only_decodes=True, has_idle=False)
    assert plan.decodes_first()[0] is plan.rows


def test_prompts_that_join_decodes_come_after_them():
    plan = make_plan([5, 3], [1, 0], only_decodes=True, has_idle=True)
    assert [x.tolist() for x in plan.decodes_first()[:2]] == [[5], [1]]
    plan.add_rows([7, 6], [4, 1])
    assert [x.tolist() for x in plan.decodes_first()[:2]] == [[5, 6, 7], [1, 1, 4]]
