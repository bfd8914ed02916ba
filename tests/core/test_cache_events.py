"""Test the events of the prefix cache. `Loop` checks that the events of any load are complete."""

from tests.core.helpers import Loop, make_request, make_scheduler
from vllm.core.kv.cache_events import CacheEventLog, public_hash
from vllm.messages import AllBlocksCleared, BlockRemoved, BlockStored


def hashes(count: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(count)]


def stored(*indices: int) -> list[tuple[list[int], int | None, list[int]]]:
    """Return (blocks, block before them, tokens) of each event about five blocks of two tokens."""
    log = CacheEventLog(block_size=2)
    log.stored(hashes(5), indices, range(10))
    known = {public_hash(value): i for i, value in enumerate(hashes(5))}
    return [
        (
            [known[value] for value in event.block_hashes],
            None if event.parent_block_hash is None else known[event.parent_block_hash],
            event.token_ids,
        )
        for event in log.drain()
    ]


def test_blocks_that_follow_each_other_are_one_event():
    assert stored() == []
    assert stored(0, 1) == [([0, 1], None, [0, 1, 2, 3])]
    assert stored(3) == [([3], 2, [6, 7])]
    assert stored(0, 2, 3) == [([0], None, [0, 1]), ([2, 3], 1, [4, 5, 6, 7])]
    assert stored(1, 3) == [([1], 0, [2, 3]), ([3], 2, [6, 7])]


def test_events_are_told_once_and_in_order():
    log = CacheEventLog(block_size=2)
    log.removed([])
    assert log.drain() == []
    log.removed(hashes(2))
    log.stored(hashes(1), [0], [5, 6])
    log.cleared()
    kinds = [type(event) for event in log.drain()]
    assert kinds == [BlockRemoved, BlockStored, AllBlocksCleared]
    assert log.drain() == []


def test_a_request_tells_its_prompt_when_it_starts_and_its_output_when_it_leaves():
    loop = Loop(make_scheduler(num_blocks=8, block_size=4))
    loop.add(make_request("a", prompt=9, max_tokens=8))
    loop.step()
    assert len(loop.follower.blocks) == 2
    loop.run()
    # 4 blocks of 4 tokens: the last of the 17 tokens was not computed.
    assert len(loop.follower.blocks) == 4
    loop.add(make_request("b", prompt=24, max_tokens=1))
    loop.run()
    # The cache has 8 blocks: 6 belong to b now, and 2 of a are left.
    assert len(loop.follower.blocks) == 8
    assert loop.scheduler.cache.pool.forget_all()
    loop.follow()
    assert not loop.follower.blocks
