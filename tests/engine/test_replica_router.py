"""Test which replica gets a request, by the tokens to compute and by prefixes."""

import random

import pytest

from vllm.engine.replicas.replica_router import PrefixMemory, ReplicaRouter
from vllm.messages import CacheKey, EngineRequest
from vllm.sampling_params import SamplingParams


def make_request(token_ids, max_tokens=100, **fields) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        eos_token_id=None,
        max_total_tokens=len(token_ids) + max_tokens,
        arrival_time=0.0,
        **fields,
    )


def make_router(num_replicas=2, *, max_num_seqs=256, has_prefix_cache=True, **fields):
    return ReplicaRouter(num_replicas, max_num_seqs, has_prefix_cache=has_prefix_cache, **fields)


def send(router, request, *core_ids, candidates=None):
    every = range(len(router.loads))
    return router.choose(request, core_ids, list(every if candidates is None else candidates))


def num_tokens(router):
    return [load.num_tokens for load in router.loads]


def test_requests_go_to_the_replica_with_the_fewest_tokens():
    router = make_router(3)
    assert send(router, make_request(range(500)), "a") == 0
    assert send(router, make_request(range(1000, 1010)), "b") == 1
    assert send(router, make_request(range(2000, 2200)), "c", "d") == 2
    # The outputs of one request share the tokens of its prompt.
    assert num_tokens(router) == [600, 110, 400]
    assert send(router, make_request([1]), "e") == 1


def test_tokens_count_until_they_are_computed():
    router = make_router()
    send(router, make_request(range(300)), "a", "b")
    router.progress(0, ["a"])
    assert num_tokens(router) == [200, 0]
    router.progress(0, ["a", "b"])
    router.end(["a", "unknown"])
    router.end(["a"])
    assert num_tokens(router) == [100, 0]
    assert router.owner("b") == 0 and router.owner("a") is None
    assert router.drop_requests_of(0) == ["b"]
    assert num_tokens(router) == [0, 0] and router.owner("b") is None


def test_equal_replicas_take_turns():
    router = make_router(3)
    chosen = []
    for number in range(6):
        chosen.append(send(router, make_request([number]), str(number)))
        router.end([str(number)])
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_prefix_attracts_requests_until_its_replica_has_too_much_to_do():
    router, prefix = make_router(), list(range(1024))
    chosen = [
        send(router, make_request([*prefix, number], max_tokens=250), str(number))
        for number in range(6)
    ]
    # The replica with the prefix gets 1275 tokens, then 251 for each further request: in the end
    # more than the 1275 tokens of the other replica without the prefix.
    assert chosen[:1] == [0] and 1 in chosen[1:]
    first_away = chosen.index(1)
    assert chosen[:first_away] == [0] * first_away


def test_a_prefix_is_known_by_all_that_decides_the_cache():
    router, prefix = make_router(), list(range(640))
    for name, fields in {
        "salt": {"cache_salt": "x"},
        "adapter": {"cache_extra_keys": (CacheKey(0, "adapter"),)},
        "none": {},
    }.items():
        first = send(router, make_request(prefix, **fields), name)
        router.end([name])
        for _ in range(3):
            assert send(router, make_request(prefix, **fields), "again") == first
            router.end(["again"])


def test_another_image_in_a_later_turn_keeps_what_is_before_it():
    memory, prompt = PrefixMemory(), list(range(640))
    image, other, later = CacheKey(10, "image"), CacheKey(10, "other"), CacheKey(300, "later")
    memory.add(memory.hashes(make_request(prompt, cache_extra_keys=(image,))), 1)
    for keys, num_known in (((image,), 640), ((image, later), 256), ((other,), 0), ((), 0)):
        hashes = memory.hashes(make_request(prompt, cache_extra_keys=keys))
        assert memory.num_known_tokens(hashes, 2) == [0, num_known]


def test_a_lost_cache_attracts_nobody():
    for forget in (lambda r: r.drop_requests_of(0), lambda r: r.forget_prefixes()):
        router, prefix = make_router(), list(range(640))
        assert send(router, make_request(prefix), "a") == 0
        router.end(["a"])
        forget(router)
        # without a known prefix, the next replica gets the request
        assert send(router, make_request(prefix), "b") == 1


def test_without_a_prefix_cache_prefixes_do_not_count():
    router, prefix = make_router(has_prefix_cache=False), list(range(640))
    chosen = []
    for number in range(4):
        chosen.append(send(router, make_request(prefix), str(number)))
        router.end([str(number)])
    assert chosen == [0, 1, 0, 1]


def test_a_full_batch_is_passed_over_for_one_with_room():
    router, prefix = make_router(max_num_seqs=1), list(range(8192))
    assert send(router, make_request(prefix, max_tokens=1), "a") == 0
    router.progress(0, ["a"])
    assert send(router, make_request(prefix, max_tokens=1), "b") == 1


def test_only_candidates_get_requests():
    router = make_router(3)
    send(router, make_request(range(500)), "a", candidates=[1])
    assert send(router, make_request([1]), "b", candidates=[1]) == 1
    assert send(router, make_request([1]), "c", candidates=[1, 2]) == 2


def test_the_memory_of_prefixes_is_bounded_and_forgets_the_oldest():
    memory = PrefixMemory(capacity=4)
    prompts = [make_request([number] * 128) for number in range(4)]
    for number, prompt in enumerate(prompts):
        memory.add(memory.hashes(prompt), number % 2)
    assert len(memory) == 4
    known = [memory.num_known_tokens(memory.hashes(prompt), 2) for prompt in prompts]
    assert known == [[0, 0], [0, 0], [128, 0], [0, 128]]


@pytest.mark.parametrize("seed", range(3))
def test_under_random_load_nothing_is_left_and_the_load_is_even(seed):
    rng, router = random.Random(seed), make_router(3, max_num_seqs=8)
    running: list[str] = []
    spread = []
    for number in range(2000):
        name = str(number)
        prompt = [rng.randrange(4)] * rng.choice((10, 100, 700)) + [number]
        replica = send(router, make_request(prompt, rng.randrange(1, 300)), name)
        assert router.owner(name) == replica
        running.append(name)
        if rng.random() < 0.6:
            router.progress(replica, [name])
        while len(running) > 30:
            router.end([running.pop(rng.randrange(len(running)))])
        spread.append(max(len(load.requests) for load in router.loads))
    # out of 30 requests, this is the most on one replica; 10 on each would be even
    assert sum(spread) / len(spread) < 16
    router.drop_requests_of(1)
    router.end(running)
    assert num_tokens(router) == [0, 0, 0]
    assert all(not load.requests and not load.prefilling for load in router.loads)
