"""Test outputs of the core with several tokens of a request: users see the same as with one token
per output.
"""

import random

import pytest

from tests.engine.fakes import logprob_rows
from tests.engine.test_output_processor import DELTA, EOS, FINAL_ONLY, LENGTH, STOP, encode, make
from vllm.messages import EngineOutput

TEXT = "a = 1\nb = 🙂\nc = 3\nd = 4"


def chunks(rng: random.Random | None, token_ids: list[int]) -> list[list[int]]:
    """Return the tokens one by one, or in groups of random sizes."""
    groups, rest = [], list(token_ids)
    while rest:
        size = 1 if rng is None else rng.randint(1, 6)
        groups.append(rest[:size])
        rest = rest[size:]
    return groups


def seen(rng, token_ids, end, **params):
    """Return everything that a user sees, joined, and the requests to abort."""
    processor = make(**params)
    outputs, aborts = [], []
    groups = chunks(rng, token_ids)
    for number, group in enumerate(groups, start=1):
        new, stopped = processor.process(
            EngineOutput(
                request_ids=["r"],
                token_ids=group,
                num_tokens=[len(group)],
                finished={"r": end} if number == len(groups) else {},
                logprobs={"r": logprob_rows(group, 1)} if "logprobs" in params else {},
            )
        )
        outputs += new
        aborts += stopped
        if processor.num_unfinished_requests == 0:
            break
    samples = [output.outputs[0] for output in outputs]
    if params["output_kind"] is not DELTA:
        samples = samples[-1:]
    return (
        "".join(sample.text for sample in samples),
        [token_id for sample in samples for token_id in sample.token_ids],
        [entries for sample in samples for entries in sample.logprobs or []],
        samples[-1].cumulative_logprob,
        (samples[-1].finish_reason, samples[-1].stop_reason),
        outputs[-1].finished,
    )


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY], ids=["delta", "final"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logprobs": 1},
        {"stop": ["= 3"], "logprobs": 1},
        {"stop": ["= 3"], "include_stop_str_in_output": True},
        {"stop": ["1", "\n"], "min_tokens": 5, "logprobs": 0},
        {"stop": ["4"], "logprobs": 1},
        {"stop": ["nothing like it"]},
    ],
    ids=str,
)
def test_users_see_the_same_however_tokens_are_grouped(kind, params):
    token_ids = encode(TEXT)
    for end, ids in ((LENGTH, token_ids), (STOP, [*token_ids, EOS])):
        want = seen(None, ids, end, output_kind=kind, **params)
        for seed in range(12):
            assert seen(random.Random(seed), ids, end, output_kind=kind, **params) == want


def test_several_requests_get_their_own_tokens():
    processor = make(output_kind=DELTA)
    outputs, _ = processor.process(
        EngineOutput(request_ids=["gone", "r"], token_ids=[7, 8, 9], num_tokens=[2, 1])
    )
    assert [output.outputs[0].token_ids for output in outputs] == [[9]]
