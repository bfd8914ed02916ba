"""Test that messages with arrays arrive unchanged in another process."""

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from vllm.message_codec import decoder, encode
from vllm.messages import (
    EngineRequest,
    LogprobRows,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    TokenEmbeddings,
)
from vllm.sampling_params import SamplingParams


def int_array(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def make_step() -> SchedulerOutput:
    request = EngineRequest(
        request_id="ü-1",
        prompt_token_ids=[0, 5, 2**31 - 1],
        sampling_params=SamplingParams(temperature=0.5, logit_bias={7: -1.5}, stop=["é"]),
        seed=-(2**63),
        eos_token_id=None,
        stop_token_ids=frozenset({3}),
        max_total_tokens=9,
        arrival_time=1.5,
        embeddings=(TokenEmbeddings(start=1, shape=(1, 2), dtype="float16", data=b"\x00\x3c" * 2),),
    )
    return SchedulerOutput(
        step_id=3,
        freed_rows=[4],
        new_requests=[NewRequest(row=2, request=request, output_token_ids=[8], block_ids=[1, 6])],
        # A strided view of an array, which the scheduler may send.
        rows=np.arange(8, dtype=np.int32)[::4],
        num_computed_tokens=int_array(7, 0),
        num_scheduled_tokens=int_array(1, 4),
        block_rows=int_array(),
        block_ids=int_array(),
        num_draft_tokens=int_array(0, 2),
        draft_token_ids=int_array(7, 9),
        shortened_tables=[(4, 2)],
    )


def make_output() -> ModelRunnerOutput:
    logprobs = LogprobRows(
        token_ids=int_array(1, 2, 3, 4).reshape(2, 2),
        logprobs=np.array([[-0.5, -np.inf], [0, -1e-30]], np.float32),
        ranks=int_array(1, 2),
    )
    return ModelRunnerOutput(
        step_id=3,
        rows=int_array(0, 2),
        token_ids=int_array(5, 2**31 - 1, 4),
        num_tokens=int_array(1, 2),
        logprobs={2: logprobs},
        prompt_logprobs={0: logprobs},
        errors={0: "not finite"},
        pooled={1: np.linspace(0, 1, 3, dtype=np.float32)},
    )


def arrays_of(value: object) -> list[npt.NDArray[np.generic]]:
    """Return every array in a message, in the order of its fields."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, msgspec.Struct):
        return [
            array for name in value.__struct_fields__ for array in arrays_of(getattr(value, name))
        ]
    if isinstance(value, dict):
        return [array for item in value.values() for array in arrays_of(item)]
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in arrays_of(item)]
    return []


@pytest.mark.parametrize("message", [make_step(), make_output()], ids=lambda m: type(m).__name__)
def test_what_executors_send_arrives_as_it_was_sent(message):
    received = decoder(type(message)).decode(encode(message))
    assert type(received) is type(message)
    sent_arrays, arrays = arrays_of(message), arrays_of(received)
    assert len(arrays) == len(sent_arrays) >= 7
    for array, sent in zip(arrays, sent_arrays, strict=True):
        assert array.dtype == sent.dtype and np.array_equal(array, sent)
    assert encode(received) == encode(message)  # all other fields are equal too


def test_a_message_with_code_or_with_an_array_of_another_type_is_refused():
    with pytest.raises(TypeError, match="function cannot be sent"):
        encode(msgspec.structs.replace(make_output(), errors={0: lambda: None}))
    floats = msgspec.structs.replace(make_output(), rows=np.zeros(2))
    with pytest.raises(msgspec.ValidationError, match="expected an array of int32, got float64"):
        decoder(ModelRunnerOutput).decode(encode(floats))
