"""Test the keys of the prefix cache for positions that a request gives."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm.core.kv.block_hash import block_hashes
from vllm.engine.input.token_positions import position_keys, with_positions
from vllm.errors import RequestError

BLOCK_SIZE = 4


def text(*starts_and_counts: tuple[int, int]) -> np.ndarray:
    """Return the positions of segments of text tokens, each from its start on."""
    columns = np.concatenate([np.arange(start, start + n) for start, n in starts_and_counts])
    return np.tile(columns.astype(np.int32), (3, 1))


def hashes(positions: np.ndarray, offset: int, num_output: int = 6) -> list[bytes]:
    """Return the hashes of the blocks of one text at these positions."""
    token_ids = list(range(positions.shape[1] + num_output))
    return block_hashes(b"", token_ids, BLOCK_SIZE, position_keys(positions, offset))


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    return sum(x == y for x, y in zip(one, other, strict=True))


def test_indices_as_positions_need_no_key():
    assert position_keys(text((0, 10)), 0) == ()
    assert num_shared(hashes(text((0, 10)), 0), block_hashes(b"", range(16), BLOCK_SIZE)) == 4


def test_a_key_is_where_positions_jump():
    assert [key.start for key in position_keys(text((0, 6), (3, 4)), -3)] == [6]
    assert [key.start for key in position_keys(text((5, 6)), 5)] == [0]
    assert [key.start for key in position_keys(text((0, 6)), 2)] == [6]
    image = text((0, 3), (3, 1), (3, 1), (3, 1), (9, 2), (20, 1))
    assert [key.start for key in position_keys(image, 12)] == [4, 8]


def test_blocks_before_the_first_difference_are_shared():
    one = hashes(text((0, 6), (3, 4)), -3)
    assert len(one) == 4
    assert num_shared(one, hashes(text((0, 6), (3, 4)), -3)) == 4
    assert num_shared(one, hashes(text((0, 6), (2, 4)), -4)) == 1
    assert num_shared(one, hashes(text((0, 10)), 0)) == 1
    # The offset counts from the first token of the output, which is in the third block.
    assert num_shared(one, hashes(text((0, 6), (3, 4)), -2)) == 2
    assert num_shared(one, hashes(text((1, 6), (4, 4)), -2)) == 0


def test_the_position_that_differs_counts():
    height, width = text((0, 10)), text((0, 10))
    height[1, 5] = width[2, 5] = 9
    assert num_shared(hashes(height, 0), hashes(width, 0)) == 1


def test_a_request_that_is_pooled_brings_none():
    request = SimpleNamespace(pooling_params=object(), prompt_token_ids=[1, 2])
    with pytest.raises(RequestError, match="positions cannot be given to a pooling model"):
        with_positions(request, text((0, 2)), SimpleNamespace(num_positions=3))
