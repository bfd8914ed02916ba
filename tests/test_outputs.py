"""Test comparing outputs with any content."""

import numpy as np
import pytest
import torch

from vllm.outputs import PoolingOutput, PoolingRequestOutput

VALUES = {
    "numbers": np.array([1.0, 2.0], np.float32),
    "a tensor": torch.tensor([1.0, 2.0]),
    "one per token": np.ones((2, 2), np.float32),
    "one number": np.ones(1, np.float32),
    "none": np.zeros(0, np.float32),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_results_of_pooling_are_equal_when_their_numbers_are(value):
    one, same, other = PoolingOutput(value), PoolingOutput(value + 0), PoolingOutput([7.0, 7.0])
    assert one == same
    assert one != other
    assert one != PoolingOutput(np.ones((3, 2), np.float32))
    assert one != value.tolist()
    assert PoolingRequestOutput("r", one, [1]) == PoolingRequestOutput("r", same, [1])
    assert PoolingRequestOutput("r", one, [1]) != PoolingRequestOutput("r", other, [1])


def test_an_array_and_a_tensor_of_the_same_numbers_are_equal():
    assert PoolingOutput(VALUES["numbers"]) == PoolingOutput(VALUES["a tensor"])
