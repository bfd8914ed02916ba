import random

import pytest

from tests.core.helpers import check_pool
from tests.exhaustive import seeds
from tests.reach import cached_blocks_of, free_queue_of
from vllm.core.kv.block_pool import BlockPool
from vllm.messages import NULL_BLOCK_ID


def held_and_remembered(pool: BlockPool, *hashes: bytes) -> list[int]:
    block_ids = pool.allocate(len(hashes))
    pool.cache_blocks(block_ids, hashes)
    return block_ids


def test_a_pool_of_only_the_null_block_is_refused():
    with pytest.raises(ValueError, match=r"got 1$"):
        BlockPool(1)


def test_every_block_but_the_null_block_can_be_taken():
    pool = BlockPool(9)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    assert pool.num_free == 0
    check_pool(pool)


def test_blocks_are_evicted_in_the_order_they_were_freed():
    pool = BlockPool(4)
    a, b, c = held_and_remembered(pool, b"a", b"b", b"c")
    pool.free([b])
    pool.free([c, a])
    assert [pool.allocate(1) for _ in range(3)] == [[b], [c], [a]]


def test_blocks_without_content_are_used_before_cached_ones():
    pool = BlockPool(4)
    a, b = held_and_remembered(pool, b"a", b"b")
    (plain,) = pool.allocate(1)
    pool.free([a, b, plain])
    assert pool.allocate(1) == [plain]
    assert pool.find([b"a"]) == [a]
    assert pool.find([b"b"]) == [b]


def test_a_freed_block_is_found_until_it_is_taken_again():
    pool = BlockPool(2)
    (a,) = held_and_remembered(pool, b"a")
    pool.free([a])
    assert pool.find([b"a"]) == [a]
    pool.allocate(1)
    assert pool.find([b"a"]) == []
    check_pool(pool)


def test_sharing_takes_a_free_block_out_of_the_queue():
    pool = BlockPool(4)
    a, b, c = held_and_remembered(pool, b"a", b"b", b"c")
    pool.free([a, b, c])
    pool.share([b])
    assert pool.num_free == 2
    assert pool.allocate(2) == [a, c]
    assert pool.find([b"b"]) == [b]


def test_a_shared_block_is_free_when_its_last_holder_gives_it_up():
    pool = BlockPool(3)
    (a,) = held_and_remembered(pool, b"a")
    pool.share([a])
    pool.free([a])
    assert (pool.num_refs(a), pool.num_free) == (1, 1)
    pool.free([a])
    assert (pool.num_refs(a), pool.num_free) == (0, 2)


def test_a_used_again_block_becomes_the_most_recently_used():
    pool = BlockPool(4)
    a, b, c = held_and_remembered(pool, b"a", b"b", b"c")
    pool.free([a, b, c])
    pool.share([a])
    pool.free([a])
    assert pool.allocate(3) == [b, c, a]


def test_the_same_content_twice_is_found_in_the_first_block():
    pool = BlockPool(4)
    first, second = held_and_remembered(pool, b"a", b"a")
    assert pool.find([b"a"]) == [first]
    pool.free([second])
    assert pool.find([b"a"]) == [first]
    assert pool.allocate(1) == [second], "a copy is not worth keeping"


def test_freeing_what_nobody_holds_is_a_bug():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="more often"):
        pool.free([1])


def test_reset_is_refused_while_a_block_is_held():
    pool = BlockPool(3)
    a, b = held_and_remembered(pool, b"a", b"b")
    pool.free([a])
    assert not pool.forget_all()
    assert pool.find([b"a"]) == [a]
    pool.free([b])
    assert pool.forget_all()
    assert pool.find([b"a"]) == []
    check_pool(pool)


def test_forgotten_contents_are_not_found_and_their_free_blocks_are_taken_first():
    pool = BlockPool(4)
    a, b, c = held_and_remembered(pool, b"a", b"b", b"c")
    pool.free([a, b])
    pool.uncache_blocks([b"b", b"c", b"unknown"])
    assert pool.find([b"a"]) == [a]
    assert pool.find([b"b"]) == pool.find([b"c"]) == []
    assert (pool.num_refs(c), pool.num_free) == (1, 2)
    assert pool.allocate(2) == [b, a]
    check_pool(pool)


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_any_use_keeps_counts_queue_and_hashes_together(seed):
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(2, 24))
    holders: list[list[int]] = []
    for _ in range(300):
        draw = rng.random()
        if draw < 0.4 and pool.num_free:
            holders.append(pool.allocate(rng.randint(0, pool.num_free)))
        elif draw < 0.7 and holders:
            pool.free(holders.pop(rng.randrange(len(holders))))
        elif draw < 0.74:
            pool.uncache_blocks({bytes([rng.randrange(30)]) for _ in range(2)})
        elif draw < 0.85 and holders and holders[-1]:
            pool.cache_blocks([rng.choice(holders[-1])], [bytes([rng.randrange(30)])])
        else:
            hashes = {bytes([rng.randrange(30)]) for _ in range(3)}
            shared = pool.find(hashes)
            assert pool.num_free_among(shared) == sum(pool.num_refs(b) == 0 for b in shared)
            pool.share(shared)
            holders.append(shared)
        check_pool(pool)
        for block_id in range(pool.num_blocks):
            assert pool.num_refs(block_id) == sum(ids.count(block_id) for ids in holders)
        assert all(NULL_BLOCK_ID not in ids for ids in holders)


@pytest.mark.parametrize("seed", seeds(5, 10))
def test_content_stays_where_its_hash_says_and_as_old_as_it_was(seed):
    """Compare the pool with a model of the cache: the content of each block, and the order of
    eviction.
    """
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(4, 16))
    memory: dict[int, bytes] = {}
    held = pool.allocate(rng.randint(1, pool.num_usable_blocks - 1))
    for number in range(300):
        draw = rng.random()
        free = [block_id for block_id in range(pool.num_blocks) if pool.is_free(block_id)]
        if draw < 0.3 and held:
            pool.free([held.pop(rng.randrange(len(held)))])
        elif draw < 0.5 and free:
            held += pool.allocate(1)
        elif draw < 0.7 and held and not pool.has_content(block_id := rng.choice(held)):
            memory[block_id] = str(number).encode()
            pool.cache_blocks([block_id], [memory[block_id]])
        elif held and free:
            place, low = rng.randrange(len(held)), rng.choice(free)
            high, order = held[place], free_queue_of(pool)
            memory[high], memory[low] = memory.get(low, b""), memory.get(high, b"")
            pool.exchange(high, low)
            held[place] = low
            assert free_queue_of(pool) == [
                high if block_id == low else block_id for block_id in order
            ]
        check_pool(pool)
        for block_hash, block_id in cached_blocks_of(pool).items():
            assert memory[block_id] == block_hash
        assert sorted(held) == [b for b in range(pool.num_blocks) if pool.num_refs(b)]


@pytest.mark.parametrize("held", [2, 3, NULL_BLOCK_ID], ids=["free", "held", "null"])
def test_only_a_held_and_a_free_block_change_places(held):
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    wrong = {2: (3, 3), 3: (a, b), NULL_BLOCK_ID: (a, NULL_BLOCK_ID)}[held]
    with pytest.raises(AssertionError, match="is not in use, or"):
        pool.exchange(*wrong)
