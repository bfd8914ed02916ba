"""Test that messages between processes arrive unchanged, and that other data is refused."""

import msgspec
import numpy as np
import pytest

from tests.engine.fakes import make_config
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.process.wire import (
    AbortRequests,
    AddRequests,
    CallCore,
    CoreFailed,
    CoreOutput,
    CoreProgress,
    CoreReady,
    Refused,
    StartCore,
    decode_from_core,
    decode_to_core,
    encode,
)
from vllm.errors import CapacityError, RequestError, WorkerCallError
from vllm.message_codec import (
    CallError,
    CallResult,
    decode_arguments,
    decode_value,
    encode_arguments,
    encode_value,
)
from vllm.messages import (
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    LogprobRows,
    SchedulerStats,
)
from vllm.sampling_params import GuidedDecodingParams, SamplingParams


def request(**params) -> EngineRequest:
    return EngineRequest(
        request_id="ü-1",
        prompt_token_ids=[0, 5, 2**31 - 1],
        sampling_params=SamplingParams(**params),
        seed=-(2**63),
        eos_token_id=None,
        stop_token_ids=frozenset({3, 4}),
        bad_words_token_ids=[[1], [2, 3]],
        max_total_tokens=9,
        arrival_time=1.5,
        cache_salt="salt",
    )


@pytest.mark.parametrize(
    "message",
    [
        AddRequests(requests=[request(), request(n=2, best_of=2, seed=2**63 - 1)]),
        AddRequests(requests=[request(stop=["\n", "é"], logit_bias={7: -1.5}, logprobs=3)]),
        AddRequests(
            requests=[request(guided_decoding=GuidedDecodingParams(json={"type": "object"}))]
        ),
        AbortRequests(request_ids=["a", "b"]),
        CallCore(call_id=3, name="reset_prefix_cache"),
        CallCore(call_id=4, name="f", arguments=encode_arguments([1, "x"], {"k": [None]})),
    ],
)
def test_messages_to_the_core_arrive_as_they_were_sent(message):
    assert decode_to_core(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        CoreProgress(phase="loading", done=1, total=0),
        CoreReady(stats=SchedulerStats(num_kv_blocks=7)),
        CoreFailed(message="no memory", is_config_error=True),
        Refused(request_id="a", message="too long", status=400, is_capacity=False),
        CallResult(call_id=1, value=encode_value("it", [1, "a", {"b": None}])),
        CallResult(call_id=2, error=CallError(message="boom", kind="worker")),
        CoreOutput(
            output=EngineOutput(
                request_ids=["a"],
                token_ids=[4],
                finished={"a": Finished(FinishReason.STOP, "x")},
                scheduled_times={"a": 2.5},
            ),
            stats=SchedulerStats(num_running=1),
        ),
    ],
)
def test_messages_of_the_core_arrive_as_they_were_sent(message):
    assert decode_from_core(encode(message)) == message


def test_arguments_and_results_arrive_as_plain_values():
    assert decode_arguments(b"") == ([], {})
    data = encode_arguments((1, b"x"), {"k": [1.5]})
    assert decode_arguments(data) == ([1, b"x"], {"k": [1.5]})
    assert decode_value(CallResult(call_id=1).value) is None


@pytest.mark.parametrize("value", [object(), len, {"a": [object()]}, 2**70])
def test_what_cannot_be_sent_is_refused_and_named(value):
    with pytest.raises(RequestError, match=r"^arguments cannot be sent between processes"):
        encode_arguments([value], {})


@pytest.mark.parametrize(
    "error", [RequestError("no"), CapacityError("full", status=503), WorkerCallError("KeyError: 1")]
)
def test_the_error_of_a_call_comes_back_as_what_it_was(error):
    found = CallError.of(error).exception()
    assert type(found) is type(error) and str(error) in str(found)
    assert found.status == error.status


@pytest.mark.parametrize("args", [{}, {"dtype": "bfloat16", "hf_overrides": {"rope_theta": 5.0}}])
def test_a_whole_config_arrives(args):
    config = EngineArgs(**args).create_engine_config()
    message = decode_to_core(encode(StartCore(config=config, models={"A": "b:C"})))
    assert message == StartCore(config=config, models={"A": "b:C"})


def test_arrays_keep_dtype_shape_and_values():
    rows = LogprobRows(
        token_ids=np.arange(6, dtype=np.int32).reshape(2, 3),
        logprobs=np.array([[0.0, -np.inf, -1.5]] * 2, np.float32),
        ranks=np.array([1, 2], np.int32),
    )
    output = EngineOutput(request_ids=["a"], token_ids=[1], logprobs={"a": rows})
    data = encode(CoreOutput(output=output, stats=SchedulerStats()))
    found = decode_from_core(data).output.logprobs["a"]
    for name in ("token_ids", "logprobs", "ranks"):
        before, after = getattr(rows, name), getattr(found, name)
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


def test_an_array_of_another_type_is_refused():
    rows = LogprobRows(
        token_ids=np.zeros((1, 1), np.int64),
        logprobs=np.zeros((1, 1), np.float32),
        ranks=np.ones(1, np.int32),
    )
    output = EngineOutput(logprobs={"a": rows})
    data = encode(CoreOutput(output=output, stats=SchedulerStats()))
    with pytest.raises(msgspec.ValidationError, match="int32"):
        decode_from_core(data)


def test_code_is_not_sent():
    with pytest.raises(RequestError, match="logits_processors are code"):
        encode(AddRequests(requests=[request(logits_processors=[print])]))


def test_what_is_no_message_is_refused():
    for data in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["Nonsense"]),
        encode(AbortRequests(request_ids=[])),
    ):
        with pytest.raises(msgspec.DecodeError):
            decode_from_core(data)


def test_a_config_that_is_not_resolved_arrives_too():
    config = make_config()
    assert decode_to_core(encode(StartCore(config=config))).config == config
