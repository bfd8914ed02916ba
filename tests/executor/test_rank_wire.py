"""Test how steps are sent to ranks, and when a rank looks for the next step."""

import socket
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.reach import looks_for_messages, replace_rank_server
from vllm.executor.ranks import rank_process
from vllm.executor.ranks.rank_process import RankLoop
from vllm.executor.ranks.rank_wire import (
    ReleaseRequests,
    RunStep,
    decode_to_rank,
    framed,
    typed_arguments,
)
from vllm.message_codec import decode_arguments, encode_arguments
from vllm.messages import BlockMoves, EngineRequest, NewRequest, SchedulerOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.process.frames import read_frame
from vllm.worker.interface import WarmUpUpdate, Worker


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PLAIN: dict[str, Any] = {
    "step_id": 7,
    "num_decodes": 3,
    "freed_rows": [],
    "new_requests": [],
    "rows": ints(4, 1, 9),
    "num_computed_tokens": ints(10, 20, 30),
    "num_scheduled_tokens": ints(1, 1, 8),
    "block_rows": ints(9, 9),
    "block_ids": ints(5, 6, 7, 8),  # the block ids of two groups
}
REQUEST = EngineRequest(
    request_id="a",
    prompt_token_ids=[1],
    sampling_params=SamplingParams(),
    seed=1,
    eos_token_id=None,
    max_total_tokens=9,
    arrival_time=0.0,
)
OTHERS: dict[str, Any] = {
    "freed_rows": [2],
    "new_requests": [NewRequest(row=3, request=REQUEST, output_token_ids=[], block_ids=[1])],
    "passed_blocks": [(1, 0, 2)],
    "num_draft_tokens": ints(0, 0, 2),
    "draft_token_ids": ints(5, 6),
    "shortened_tables": [(1, 2)],
    "block_moves": BlockMoves(renamed=np.array([[1, 2]], np.int32), copied=ints()),
    "restored_states": np.array([[3, 12]], np.int32),
    "kept_states": np.array([[1, 1, 12], [9, 4, 11]], np.int32),
    "num_replayed_tokens": ints(0, 3, 0),
    "dropped_media": ["image:old"],
    "encoded_media": [(1, 0, 0, 1), (1, 2, 1, 3)],
}


def received(message: Any) -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(framed(message))
        kind, data = read_frame(theirs.recv)
    return decode_to_rank(data, kind)


def plain_values(value: Any) -> Any:
    """Return values that can be compared with `==`."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, msgspec.Struct):
        return {name: plain_values(getattr(value, name)) for name in value.__struct_fields__}
    return [plain_values(each) for each in value] if isinstance(value, list) else value


def test_every_field_of_a_step_arrives():
    assert PLAIN.keys() | OTHERS.keys() == set(SchedulerOutput.__struct_fields__)
    steps = [SchedulerOutput(**PLAIN)]
    steps += [SchedulerOutput(**PLAIN | {name: value}) for name, value in OTHERS.items()]
    for step in steps:
        assert plain_values(received(RunStep(step=step)).step) == plain_values(step)
    assert len(framed(RunStep(step=steps[0]))) < 100 < len(framed(RunStep(step=steps[1])))


class OneStep:
    """Runs the messages of a rank: every message starts a step. The engine disconnects after the
    step.
    """

    def __init__(self, engine: socket.socket, *, expects_step: bool) -> None:
        self.engine, self.expects_step, self.has_step = engine, expects_step, False

    def handle(self, message: object) -> None:
        self.has_step = True

    def finish_step(self) -> None:
        self.has_step = False
        self.engine.close()


@pytest.mark.parametrize(
    ("expects_step", "long_s", "looks"), [(True, 0.0, 1), (True, 60.0, 0), (False, 0.0, 0)]
)
def test_a_rank_looks_for_the_next_step_after_a_long_one(monkeypatch, expects_step, long_s, looks):
    monkeypatch.setattr(rank_process, "LONG_STEP_S", long_s)
    # With this interval, the rank must notice at once that the engine has left.
    monkeypatch.setattr(rank_process, "LOOK_S", 3600.0)
    found = looks_for_messages(monkeypatch)
    engine, rank = socket.socketpair()
    with rank:
        loop = RankLoop(rank, 0, 0)
        replace_rank_server(loop, OneStep(engine, expects_step=expects_step))
        engine.sendall(framed(ReleaseRequests(request_ids=["a"])))
        loop.run()
    assert len(found) == looks


@pytest.mark.parametrize(
    ("method", "args"),
    [
        (Worker.next_warm_up, [WarmUpUpdate(given_up="too large", seconds=0.5)]),
        (Worker.replace_buckets, [[[0, 2, 128, 4]]]),
        (Worker.wake_up, []),
        (Worker.wake_up, [["weights"]]),
        (Worker.pin_adapter, [3]),
    ],
)
def test_the_arguments_of_a_call_arrive_with_their_types(method, args):
    sent, _ = decode_arguments(encode_arguments(args, {}))
    assert typed_arguments(method, sent) == args
