"""Test the tensors that a forward pass gives to the model and its attention layers."""

import numpy as np
import torch

from tests.worker.test_input_batch import int_array, new_request, step
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import build_ragged_input

CPU = torch.device("cpu")


def filled_batch() -> InputBatch:
    batch = InputBatch(max_num_seqs=4, max_model_len=64, max_blocks=16)
    batch.update(
        step(
            [
                new_request(0, [10, 11, 12, 13, 14], blocks=[3, 7]),
                new_request(2, [20, 21, 22], output=[23], blocks=[5]),
                new_request(3, list(range(30, 40)), blocks=[8, 9, 1]),
            ]
        )
    )
    return batch


def test_decodes_come_first_and_every_token_knows_its_slot():
    launch = Launch(int_array(2, 0, 3), int_array(3, 0, 4), int_array(1, 5, 4))
    built = build_ragged_input(filled_batch(), launch, block_size=4, device=CPU)
    assert built.input_ids.tolist() == [23, 10, 11, 12, 13, 14, 34, 35, 36, 37]
    assert built.context.positions.tolist() == [[3, 0, 1, 2, 3, 4, 4, 5, 6, 7]]
    blocks_of_0 = [3 * 4 + i for i in range(4)] + [7 * 4]
    assert built.context.attention.slot_mapping.tolist() == [
        5 * 4 + 3,
        *blocks_of_0,
        36,
        37,
        38,
        39,
    ]
    assert built.context.attention.num_decodes == 1
    assert built.context.attention.query_start_loc.tolist() == [0, 1, 6, 10]
    assert built.context.attention.seq_lens.tolist() == [4, 5, 8]
    assert built.context.attention.block_tables.shape == (3, 2)


def test_only_rows_that_reach_their_last_token_sample():
    launch = Launch(int_array(2, 0, 3), int_array(3, 0, 4), int_array(1, 5, 4))
    built = build_ragged_input(filled_batch(), launch, block_size=4, device=CPU)
    assert built.sampled.tolist() == [0, 1]
    assert built.logits_indices is not None and built.logits_indices.tolist() == [0, 5]


def test_a_pure_decode_launch_needs_no_selection_of_rows():
    launch = Launch(int_array(0, 2), int_array(4, 3), int_array(1, 1))
    built = build_ragged_input(filled_batch(), launch, block_size=4, device=CPU)
    assert built.logits_indices is None
    assert built.input_ids.tolist() == [14, 23]
    assert np.array_equal(built.context.attention.query_start_loc, [0, 1, 2])
