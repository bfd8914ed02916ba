"""Test that the arrays of the runner follow the decisions of the scheduler."""

import msgspec
import numpy as np

from vllm.messages import EngineRequest, NewRequest, SchedulerOutput
from vllm.sampling_params import SamplingParams
from vllm.worker.batch.input_batch import InputBatch


def int_array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new_request(row: int, prompt: list[int], output=(), blocks=(1,)) -> NewRequest:
    spec = EngineRequest(
        request_id=f"r{row}",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(),
        seed=0,
        eos_token_id=None,
        max_total_tokens=32,
        arrival_time=0.0,
    )
    return NewRequest(row=row, request=spec, output_token_ids=list(output), block_ids=list(blocks))


def step(new=(), block_rows=(), block_ids=(), freed=()) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=0,
        freed_rows=list(freed),
        new_requests=list(new),
        rows=int_array(),
        num_computed_tokens=int_array(),
        num_scheduled_tokens=int_array(),
        block_rows=int_array(*block_rows),
        block_ids=int_array(*block_ids),
    )


def test_a_new_request_brings_its_tokens_and_blocks():
    batch = InputBatch(max_num_seqs=2, max_model_len=32, max_blocks=4)
    batch.update(step([new_request(1, [5, 6, 7], blocks=[3, 9])]))
    assert batch.num_tokens[1] == 3 and batch.num_prompt_tokens[1] == 3
    assert batch.token_ids[1, :3].tolist() == [5, 6, 7]
    assert batch.block_table[1, :2].tolist() == [3, 9]


def test_a_preempted_request_returns_with_its_output():
    batch = InputBatch(max_num_seqs=2, max_model_len=32, max_blocks=4)
    batch.update(step([new_request(0, [5, 6], output=[7, 8])]))
    assert batch.num_tokens[0] == 4 and batch.num_prompt_tokens[0] == 2
    assert batch.token_ids[0, :4].tolist() == [5, 6, 7, 8]


def test_blocks_are_appended_in_order_even_several_to_one_row():
    batch = InputBatch(max_num_seqs=3, max_model_len=32, max_blocks=8)
    batch.update(step([new_request(r, [1], blocks=[r + 1]) for r in range(3)]))
    batch.update(step(block_rows=[2, 0, 0, 0, 1], block_ids=[20, 10, 11, 12, 15]))
    assert batch.block_table[0, :4].tolist() == [1, 10, 11, 12]
    assert batch.block_table[1, :2].tolist() == [2, 15]
    assert batch.block_table[2, :2].tolist() == [3, 20]
    assert batch.num_blocks.tolist() == [4, 2, 2]


def test_a_reused_row_shows_nothing_of_its_last_owner():
    batch = InputBatch(max_num_seqs=1, max_model_len=32, max_blocks=8)
    batch.update(step([new_request(0, [1, 2, 3], blocks=[4, 5])]))
    batch.record(batch.expect(int_array(0)), int_array(9))
    batch.update(step([new_request(0, [8], blocks=[6])], freed=[0]))
    batch.update(step(block_rows=[0], block_ids=[7]))
    batch.record(batch.expect(int_array(0)), int_array(2))
    assert batch.token_ids[0, : batch.num_tokens[0]].tolist() == [8, 2]
    assert batch.block_table[0, : batch.num_blocks[0]].tolist() == [6, 7]


def test_a_token_that_comes_late_goes_to_its_place_or_nowhere():
    batch = InputBatch(max_num_seqs=3, max_model_len=8, max_blocks=1)
    batch.update(step([new_request(r, [r]) for r in range(3)]))
    first = batch.expect(int_array(2, 0))
    second = batch.expect(int_array(2, 0))
    assert batch.num_tokens.tolist() == [3, 1, 3]
    batch.update(step([new_request(0, [7])], freed=[0]))
    for expected, values in ((first, (5, 6)), (second, (8, 9))):
        rows, token_ids = batch.record(expected, int_array(*values))
        assert rows.tolist() == [2] and token_ids.tolist() == [values[0]]
    assert batch.token_ids[2, :3].tolist() == [2, 5, 8]
    assert batch.token_ids[0, : batch.num_tokens[0]].tolist() == [7]


def test_every_group_of_layers_has_a_table_and_null_blocks_where_its_window_has_passed():
    batch = InputBatch(max_num_seqs=2, max_model_len=32, max_blocks=4, num_groups=2)
    batch.update(step([new_request(1, [5, 6, 7], blocks=[1, 2, 0, 6])]))
    assert batch.block_tables[:, 1, :2].tolist() == [[1, 2], [0, 6]]
    appended = step(block_rows=[0, 1, 1], block_ids=[7, 8, 3, 9, 4, 10])
    batch.update(msgspec.structs.replace(appended, passed_blocks=[(1, 1, 2)]))
    assert batch.block_tables[:, 1].tolist() == [[1, 2, 3, 4], [0, 0, 9, 10]]
    assert batch.block_tables[:, 0, 0].tolist() == [7, 8]
    assert batch.num_blocks.tolist() == [1, 4]
    assert batch.block_table[1].tolist() == [1, 2, 3, 4]
