"""Test that a pooling request finishes when its prompt is computed, and never holds more blocks
than its prompt needs.
"""

import numpy as np
import pytest

from tests.core.helpers import make_request, make_scheduler, num_scheduled
from vllm.core.scheduler import Scheduler
from vllm.errors import RequestError
from vllm.messages import EngineOutput, Finished, FinishReason, ModelRunnerOutput, SchedulerOutput
from vllm.pooling_params import PoolingParams


def request(request_id: str, prompt: int | list[int]):
    made = make_request(request_id, prompt, max_tokens=1)
    return type(made)(
        **{name: getattr(made, name) for name in made.__struct_fields__}
        | {"pooling_params": PoolingParams()}
    )


def result(step: SchedulerOutput, rows: list[int], errors: list[int] = ()) -> ModelRunnerOutput:  # type: ignore[assignment]
    none = np.empty(0, np.int32)
    return ModelRunnerOutput(
        step_id=step.step_id,
        rows=none,
        token_ids=none,
        pooled={row: np.array([row], np.float32) for row in rows},
        errors=dict.fromkeys(errors, "not finite"),
    )


def run(scheduler: Scheduler, errors: list[int] | None = None) -> EngineOutput:
    step = scheduler.schedule()
    scheduler_rows = scheduler.running.at(step.rows)
    ends = step.num_computed_tokens + step.num_scheduled_tokens
    done = [
        r.row
        for r, end in zip(scheduler_rows, ends.tolist(), strict=True)
        if end == r.num_prompt_tokens
    ]
    failed = [row for row in errors or [] if row in done]
    return scheduler.update(result(step, [row for row in done if row not in failed], failed))


def test_it_ends_with_its_prompt():
    scheduler = make_scheduler()
    for name, length in (("a", 5), ("b", 1), ("c", 9)):
        scheduler.add_request(request(name, length))
    output = run(scheduler)
    assert output.finished == dict.fromkeys(["a", "b", "c"], Finished(FinishReason.STOP))
    assert set(output.pooled) == {"a", "b", "c"} and output.request_ids == []
    assert output.num_cached_tokens == {"a": 0, "b": 0, "c": 0}
    assert scheduler.num_unfinished_requests == 0
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable_blocks


def test_a_long_prompt_comes_in_chunks_and_its_prefix_is_found_again():
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2)
    prompt = list(range(20))
    scheduler.add_request(request("a", prompt))
    assert [bool(run(scheduler).pooled) for _ in range(3)] == [False, False, True]
    scheduler.add_request(request("b", prompt))
    step = scheduler.schedule()
    assert num_scheduled(scheduler, step) == {"b": 4}
    assert scheduler.update(result(step, step.rows.tolist())).num_cached_tokens == {"b": 16}


def test_a_prompt_may_fill_the_whole_length_and_the_whole_cache():
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    scheduler.add_request(request("a", 16))
    assert list(run(scheduler).pooled) == ["a"]
    with pytest.raises(RequestError, match="16"):
        scheduler.add_request(request("b", 17))


def test_one_failure_ends_one_request():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add_request(request(name, 3))
    output = run(scheduler, errors=[1])
    (failed,) = [name for name, end in output.finished.items() if end.error == "not finite"]
    (other,) = output.pooled
    assert {failed, other} == {"a", "b"}
    scheduler.add_request(request(failed, 3))  # the id of the failed request can be used again
    only = run(scheduler, errors=[0, 1])
    assert only.finished[failed].reason is FinishReason.ERROR and not only.pooled


def test_what_was_cancelled_meanwhile_has_no_result():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add_request(request(name, 3))
    step = scheduler.schedule()
    scheduler.abort_requests(["a"])
    assert list(scheduler.update(result(step, step.rows.tolist())).pooled) == ["b"]
