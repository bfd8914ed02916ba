from collections.abc import Sequence

import numpy as np
import pytest

from tests.core.helpers import make_request
from tests.reach import cached_blocks_of
from vllm.core.kv.block_hash import block_hashes, group_keys, root_hash
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.kv_cache_spec import KVCacheGroup
from vllm.messages import NULL_BLOCK_ID
from vllm.request import Request


def make_cache(num_blocks: int = 16, block_size: int = 4, enable_caching: bool = True):
    return KVCacheManager(num_blocks + 1, block_size, enable_caching)


def make_entry(prompt: Sequence[int], request_id: str = "a", **kwargs) -> Request:
    return Request(make_request(request_id, list(prompt), **kwargs), (0,))


def computed(cache: KVCacheManager, prompt: Sequence[int], **kwargs) -> Request:
    """Return a request whose whole prompt is computed."""
    request = make_entry(prompt, **kwargs)
    cache.admit(request, cache.find_prefix(request))
    cache.cache_blocks(request, len(prompt))
    cache.begin_step()
    return request


# ---- hashes ---------------------------------------------------------------------------------


def test_hashes_are_the_same_in_every_process_and_release():
    root = root_hash(make_request())
    assert root.hex() == "275e5c8ef8465995b755333fc1cf4ad7d628b86603742602a0d9fae2baddc97d"
    (block,) = block_hashes(root, [1, 2, 3, 4], 4)
    assert block.hex() == "99f74ee66783974a1ff813346413e7719aee4cf973d7c51cd9f6de6de57d049a"


def test_hashes_differ_by_salt_extra_keys_parent_tokens_and_order():
    def hash_of(*blocks, **kwargs):
        request, start = make_request(**kwargs), 0
        parent = root_hash(request)
        for tokens in blocks:
            keys = request.cache_extra_keys
            (parent,) = block_hashes(parent, tokens, len(tokens), keys, start)
            start += len(tokens)
        return parent

    different = [
        hash_of([1, 2], [3, 4]),
        hash_of([3, 4], [1, 2]),
        hash_of([3, 4]),
        hash_of([1, 2, 3, 4]),
        hash_of([1, 2], [3, 5]),
        hash_of([0, 2], [3, 4]),
        hash_of([1, 2], [3, 4], salt="s"),
        hash_of([1, 2], [3, 4], salt="t"),
        hash_of([1, 2], [3, 4], extra_keys=[(0, "s")]),
        hash_of([1, 2], [3, 4], extra_keys=[(1, "s")]),
        hash_of([1, 2], [3, 4], extra_keys=[(2, "s")]),
        hash_of([1, 2], [3, 4], extra_keys=[(3, "s")]),
        hash_of([1, 2], [3, 4], extra_keys=[(0, "s"), (0, "t")]),
        hash_of([1, 2], [3, 4], extra_keys=[(0, "s"), (1, "t")]),
        hash_of([1, 2], [3, 4], extra_keys=[(0, "s"), (2, "t")]),
        hash_of([1, 2], [3, 4], extra_keys=[(0, "st")]),
        hash_of([1, 2], [3, 4], extra_keys=[(0, ""), (0, "st")]),
        hash_of([1, 2], [3, 4], salt="s", extra_keys=[(0, "t")]),
        hash_of([1, 2], [3, 4], salt="t", extra_keys=[(0, "s")]),
    ]
    assert len(set(different)) == len(different)


def test_hashes_of_several_blocks_are_those_of_one_after_the_other():
    root = root_hash(make_request())
    first, second = block_hashes(root, [1, 2, 3, 4, 5], 2)
    assert block_hashes(root, [1, 2], 2) == [first]
    assert block_hashes(first, [3, 4], 2) == [second]
    assert block_hashes(second, [5], 2) == []


def test_any_text_can_be_a_salt():
    assert root_hash(make_request(salt="\ud800")) != root_hash(make_request(salt="ä"))


# ---- prefixes -------------------------------------------------------------------------------


def test_the_longest_cached_prefix_is_found():
    cache = make_cache()
    first = computed(cache, range(12))
    assert cache.find_prefix(make_entry([*range(8), 99, 99, 99, 99, 99])) == first.block_ids[:2]
    assert cache.find_prefix(make_entry([*range(12), 99])) == first.block_ids[:3]
    assert cache.find_prefix(make_entry([99, *range(12)])) == []


@pytest.mark.parametrize(("num_tokens", "num_found"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_prefix_leaves_at_least_one_token_to_compute(num_tokens, num_found):
    cache = make_cache()
    computed(cache, range(12))
    assert len(cache.find_prefix(make_entry(range(num_tokens)))) == num_found


def test_only_computed_full_blocks_are_found():
    cache = make_cache()
    request = make_entry(range(12))
    cache.admit(request, [])
    cache.cache_blocks(request, 7)
    assert cache.find_prefix(make_entry(range(12))) == request.block_ids[:1]


@pytest.mark.parametrize("other", [{"salt": "s"}, {"extra_keys": [(0, "lora")]}])
def test_requests_with_other_keys_share_nothing(other):
    cache = make_cache()
    computed(cache, range(12))
    assert cache.find_prefix(make_entry(range(12), **other)) == []


@pytest.mark.parametrize(("start", "num_shared"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (99, 3)])
def test_requests_share_the_blocks_before_the_position_of_a_key(start, num_shared):
    cache = make_cache()
    first = computed(cache, range(13), extra_keys=[(start, "one image")])
    same = make_entry(range(13), extra_keys=[(start, "one image")])
    assert cache.find_prefix(same) == first.block_ids[:3]
    other = make_entry(range(13), extra_keys=[(start, "another image")])
    assert cache.find_prefix(other) == first.block_ids[:num_shared]
    assert cache.find_prefix(make_entry(range(13))) == first.block_ids[:num_shared]


def test_a_request_for_prompt_logprobs_is_computed_whole_and_shared_by_others():
    cache = make_cache()
    computed(cache, range(12))
    assert cache.find_prefix(make_entry(range(12), prompt_logprobs=0)) == []
    cache = make_cache()
    request = computed(cache, range(12), prompt_logprobs=0)
    assert cache.find_prefix(make_entry(range(12))) == request.block_ids[:2]


def test_without_caching_nothing_is_found_or_kept():
    cache = make_cache(enable_caching=False)
    request = computed(cache, range(12))
    assert cache.find_prefix(make_entry(range(12))) == []
    assert request.block_hashes == []


def test_the_end_of_a_sequence_is_evicted_before_its_beginning():
    cache = make_cache(num_blocks=3)
    request = computed(cache, range(12))
    cache.free(request)
    cache.pool.allocate(1)
    assert len(cache.find_prefix(make_entry(range(13)))) == 2


def test_output_tokens_are_found_too():
    cache = make_cache()
    request = make_entry(range(6))
    request.token_ids += [6, 7, 8]
    cache.admit(request, [])
    cache.cache_blocks(request, 8)
    assert cache.find_prefix(make_entry(range(10))) == request.block_ids[:2]


def test_blocks_are_computed_once_the_step_that_computes_them_is_over():
    cache = make_cache()
    old = computed(cache, range(4))
    new = make_entry(range(10, 18))
    cache.admit(new, [])
    cache.cache_blocks(new, 8)
    assert cache.are_computed(old.block_ids)
    assert not cache.are_computed([*old.block_ids, new.block_ids[1]])
    cache.begin_step()
    assert cache.are_computed(new.block_ids)


# ---- free blocks for a request --------------------------------------------------------------


def test_blocks_that_are_held_by_others_cost_nothing_and_free_ones_do():
    cache = make_cache(num_blocks=4)
    first = computed(cache, range(8))
    second = make_entry(range(16))
    assert cache.num_lacking(second, cache.find_prefix(second)) == 0
    cache.free(first)
    assert cache.num_lacking(second, cache.find_prefix(second)) == 0
    second.token_ids.append(1)
    assert cache.num_lacking(second, cache.find_prefix(second)) == 1


def test_admission_takes_the_prefix_and_room_for_every_known_token():
    cache = make_cache()
    first = computed(cache, range(8))
    second = make_entry([*range(8), 99, 98])
    cache.admit(second, cache.find_prefix(second))
    assert second.block_ids[:2] == first.block_ids
    assert len(second.block_ids) == 3
    assert cache.pool.num_refs(first.block_ids[0]) == 2
    cache.free(second)
    cache.free(first)
    assert cache.pool.num_free == 16


# ---- several groups of layers ---------------------------------------------------------------


def make_grouped(windows: Sequence[int | None], num_blocks: int = 64) -> KVCacheManager:
    groups = [KVCacheGroup(window) for window in windows]
    return KVCacheManager(num_blocks + 1, 4, True, groups=groups)


def tables_of(request: Request) -> list[list[int]]:
    return [request.block_ids, *request.more_block_ids]


def test_every_group_has_a_table_and_no_block_twice():
    cache = make_grouped([None, 6])
    request = computed(cache, range(14))
    assert [len(table) for table in tables_of(request)] == [4, 4]
    assert len(set(cache.held(request))) == 8
    assert cache.num_blocks_for(14) == 8
    assert cache.extend([request]) == [request.block_ids[4], request.more_block_ids[0][4]]
    cache.free(request)
    assert cache.pool.num_free == 64 and tables_of(request) == [[]]


def test_a_window_that_has_passed_gives_its_blocks_back():
    cache = make_grouped([None, 6])
    request = computed(cache, range(20))
    first, second = request.more_block_ids[0][:2]
    # A query at position 8 sees positions 3 to 8, and a query at position 9 sees 4 to 9.
    assert cache.free_out_of_window(request, 8) == []
    assert cache.free_out_of_window(request, 9) == [(1, 1)]
    assert cache.free_out_of_window(request, 9) == []
    assert cache.free_out_of_window(request, 16) == [(1, 2)]
    assert request.more_block_ids[0][:2] == [NULL_BLOCK_ID] * 2
    assert request.more_block_ids[0][2] != NULL_BLOCK_ID
    assert cache.pool.num_refs(first) == cache.pool.num_refs(second) == 0
    assert NULL_BLOCK_ID not in request.block_ids
    assert cache.num_passed(np.array([8, 9, 16])).tolist() == [0, 1, 2]
    cache.free(request)
    assert cache.pool.num_free == 64


def test_a_hit_needs_only_the_blocks_in_the_window_at_its_end():
    cache = make_grouped([None, 6])
    first = computed(cache, range(24))
    cache.free_out_of_window(first, 24)
    gone, kept = first.more_block_ids[0][:4], first.more_block_ids[0][4:]
    assert gone == [NULL_BLOCK_ID] * 4
    # Freed blocks can still be found as a prefix, until another request takes them.
    cache.pool.allocate(cache.pool.num_free)
    shared = cache.find_prefix(make_entry([*range(24), 99]))
    assert shared == [*first.block_ids, *[NULL_BLOCK_ID] * 4, *kept]
    assert cache.num_tokens_in(shared) == 24
    # A prefix that ends earlier needs a block of the window that is gone, so nothing is found,
    # although the other group has all blocks.
    assert cache.find_prefix(make_entry([*range(20), 99])) == []


def test_a_hit_ends_where_the_window_of_every_group_is_there():
    cache = make_grouped([None, 6, 10])
    first = computed(cache, range(40))
    tables = [list(table) for table in tables_of(first)]
    hashes = first.block_hashes

    def num_found(*missing: tuple[int, int]) -> int:
        keys = {key for index, group in missing for key in group_keys([hashes[index]], group)}
        blocks = {key: cached_blocks_of(cache.pool).pop(key) for key in keys}
        shared = cache.find_prefix(make_entry([*range(40), 99]))
        cached_blocks_of(cache.pool).update(blocks)
        num = len(shared) // 3
        for group, window in enumerate((None, 6, 10)):
            start = 0 if window is None else max(0, 4 * num - window + 1) // 4
            expected = [NULL_BLOCK_ID] * start + tables[group][start:num]
            assert shared[group * num : (group + 1) * num] == expected
        return num

    assert num_found() == 10
    assert num_found((9, 0)) == num_found((9, 1)) == num_found((9, 2)) == 9
    assert num_found((8, 1)) == 8  # a query at 40 sees positions 35 to 39
    assert num_found((7, 1)) == 10
    assert num_found((7, 2)) == 7
    assert num_found((6, 2)) == 10
    assert num_found((5, 0), (4, 2)) == 4
    assert num_found((0, 0)) == num_found((1, 0), (0, 1)) == 0


def test_a_failed_request_is_forgotten_in_every_group():
    cache = make_grouped([None, 6])
    request = computed(cache, range(16))
    cache.free_out_of_window(request, 15)
    cache.free(request)
    cache.uncache_blocks(request)
    assert not cached_blocks_of(cache.pool)


def test_a_block_of_one_group_is_never_found_for_another():
    cache = make_grouped([6, 6])
    request = computed(cache, range(8))
    shared = cache.find_prefix(make_entry([*range(8), 99]))
    assert shared == cache.tables(request)
    assert len(set(shared)) == 4
