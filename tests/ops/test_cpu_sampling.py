"""Test what the sampling kernels refuse; tests/sample tests their results."""

import re

import numpy as np
import pytest
import torch

from tests.loops import loop_over
from vllm.ops.cpu.sampling import RowChanges, RowNumbers, load_sampling_kernels

N, VOCAB_SIZE = 3, 300
LOGITS = torch.zeros(N, VOCAB_SIZE)
PARAMS = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])[:, None].expand(-1, N).contiguous()
KEYS, POSITIONS = np.arange(N, dtype=np.uint64), np.arange(N, dtype=np.int64)
CHANGED = np.ones(N, np.bool_)
IDS, VALUES = torch.zeros(N, 2, dtype=torch.int32), torch.zeros(N, 2)
MASK_OF, WORDS = np.zeros(N, np.int32), torch.zeros(1, 10, dtype=torch.int32)

pytestmark = pytest.mark.skipif(
    load_sampling_kernels() is None, reason="the C++ kernels are not built"
)


def tokens(dtype=torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((N,), 7, dtype=dtype), torch.full((N,), 7, dtype=dtype)


def changes(**of):
    return {"params": PARAMS, "changes": RowChanges(CHANGED, **of)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": tokens(torch.int64)}, "out must be dense torch.int32 [3]"),
        ({"params": PARAMS[:, :2]}, "params must be dense torch.float32 [8, 3]"),
        ({"params": PARAMS}, "random sampling needs keys"),
        ({"rows": np.array([0, 3])}, "request index 3 must be below 3"),
        ({"rows": np.array([2, -1])}, "request index -1 must be below 3"),
        ({"rows": np.array([0], np.int32)}, "rows must be a dense vector of int64"),
        ({"numbers": RowNumbers(KEYS)}, "random numbers need keys and positions"),
        ({"numbers": RowNumbers(KEYS, POSITIONS[:2])}, "keys (3) and positions (2)"),
        ({"numbers": RowNumbers(KEYS, KEYS)}, "positions must be a dense vector of int64"),
        (
            {"numbers": RowNumbers(exponentials=torch.ones(N, 130))},
            "needs at least 131 random numbers, got 130",
        ),
        (
            {"changes": RowChanges(CHANGED[:2])},
            "changed must have one entry for each of the 3 requests, got 2",
        ),
        (changes(edits=(IDS, VALUES[:, :1])), "values of edits must be dense torch.float32 [3, 2]"),
        (changes(penalties=(IDS.long(), VALUES)), "token_ids of penalties must be dense"),
        (
            {"changes": RowChanges(CHANGED, penalties=(IDS, VALUES))},
            "params must be given if there are penalties",
        ),
        (changes(masks=(MASK_OF, WORDS[:, :9])), "a mask of 9 words is too short for 300 tokens"),
        (changes(masks=(MASK_OF + 1, WORDS)), "3 requests, got 3 for 1 masks"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    out = arguments.get("out", tokens())
    with pytest.raises(ValueError, match=re.escape(message)):
        load_sampling_kernels().sample(LOGITS, **{**arguments, "out": out})
    assert all((written == 7).all() for written in out), "a refused call wrote tokens"


@pytest.mark.parametrize(
    "logits",
    [LOGITS.half(), LOGITS.to("meta"), LOGITS[0], LOGITS[:, :0]],
    ids=["half", "meta", "1-d", "V = 0"],
)
def test_logits_that_cannot_be_read_are_refused(logits):
    kernels, out = load_sampling_kernels(), tokens()
    with pytest.raises(ValueError, match="logits must be"):
        kernels.sample(logits, out)
    with pytest.raises(ValueError, match="logits must be"):
        kernels.gather_logprobs(logits, out[0], 0)


def test_no_row_of_an_empty_launch_can_be_sampled():
    out = tokens()[0][:0], tokens()[1][:0]
    with pytest.raises(ValueError, match="request index 0 must be below 0"):
        load_sampling_kernels().sample(LOGITS[:0], out, rows=np.array([0]))


def test_log_probabilities_of_what_is_not_there_are_refused():
    kernels, token_ids = load_sampling_kernels(), torch.tensor([0, 1, 2])
    for row in (-1, N):
        with pytest.raises(ValueError, match=f"request index {row} must be below 3"):
            kernels.gather_logprobs(LOGITS, token_ids, 2, np.array([0, row]))
    with pytest.raises(ValueError, match="num_logprobs must not be negative, got -1"):
        kernels.gather_logprobs(LOGITS, token_ids, -1)
    with pytest.raises(ValueError, match="token_ids must be dense"):
        kernels.gather_logprobs(LOGITS, token_ids[:2], 2)


def test_a_given_token_outside_the_vocabulary_is_refused():
    for dtype, token in [
        *((torch.int32, token) for token in (VOCAB_SIZE, -1)),
        *((torch.int64, token) for token in (VOCAB_SIZE, -1, 2**32 + 1, -(2**32))),
    ]:
        token_ids = torch.tensor([0, token, 0], dtype=dtype)
        with pytest.raises(
            IndexError,
            match=rf"token_ids\[1\] must be a token of the vocabulary of 300, got {token}",
        ):
            load_sampling_kernels().gather_logprobs(LOGITS, token_ids, 2)


def test_random_numbers_need_a_position_for_each_key():
    with pytest.raises(ValueError, match=r"keys \(3\) and positions \(2\)"):
        load_sampling_kernels().exponentials(KEYS, POSITIONS[:2], 4)


@loop_over("number", [float("nan"), float("inf"), -1.0, 0.0])
@loop_over("vocab_size", [1, 127, 128, 200, 256, 300])
def test_tokens_are_in_the_vocabulary_whatever_the_random_numbers_are(
    vector_isa, vocab_size, number
):
    logits = LOGITS.new_zeros(N, vocab_size)
    numbers = RowNumbers(exponentials=torch.full((N, vocab_size // 128 + 129), number))
    out = tokens()
    load_sampling_kernels().sample(logits, out, params=PARAMS, numbers=numbers)
    assert all(((ids >= 0) & (ids < vocab_size)).all() for ids in out)


def test_only_the_rows_asked_for_are_sampled():
    out = tokens()
    load_sampling_kernels().sample(LOGITS, out, rows=np.array([2, 0]))
    assert [written.tolist() for written in out] == [[0, 7, 0], [0, 7, 0]]


@pytest.mark.parametrize(
    ("logits", "is_supported"),
    [
        (LOGITS, True),
        (LOGITS.bfloat16(), True),
        (LOGITS.half(), False),
        (LOGITS.to("meta"), False),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_float32_and_bfloat16_on_the_host_are_supported(logits, is_supported):
    assert load_sampling_kernels().supports(logits) is is_supported
