"""Time the router of replicas for one request, as JSON.

    python benchmarks/bench_replica_router.py [--replicas N] [--running N]

For each length of prompt: choosing the replica, its first token, and its end. Prompts share a
beginning, so that the memory of prefixes has to look through all of it.
"""

import argparse
import json
import statistics
import time

from vllm.engine.replicas.replica_router import ReplicaRouter
from vllm.messages import EngineRequest
from vllm.sampling_params import SamplingParams

LENGTHS = (16, 128, 1024, 8192, 100_000)
ROUNDS = 2000


def make_request(token_ids: list[int]) -> EngineRequest:
    return EngineRequest(
        request_id="",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=256),
        seed=0,
        eos_token_id=None,
        max_total_tokens=len(token_ids) + 256,
        arrival_time=0.0,
    )


def measure(length: int, num_replicas: int, num_running: int) -> dict[str, float]:
    router = ReplicaRouter(num_replicas, 256, has_prefix_cache=True)
    everyone = list(range(num_replicas))
    for number in range(num_running):
        router.choose(make_request([number] * 100), [f"running-{number}"], everyone)
    running = list(router.loads[0].requests)
    prefix = list(range(length - 1))
    seconds = []
    for number in range(ROUNDS):
        request, core_ids = make_request([*prefix, number]), [str(number)]
        begin = time.perf_counter()
        replica = router.choose(request, core_ids, everyone)
        router.progress(replica, core_ids)
        router.end(core_ids)
        seconds.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        router.progress(0, running)
    per_step = (time.perf_counter() - begin) / ROUNDS
    return {
        "prompt_tokens": length,
        "median_us": round(statistics.median(seconds) * 1e6, 2),
        "p99_us": round(sorted(seconds)[int(0.99 * ROUNDS)] * 1e6, 2),
        "step_us": round(per_step * 1e6, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--running", type=int, default=256, help="requests that run meanwhile")
    args = parser.parse_args()
    results = [measure(length, args.replicas, args.running) for length in LENGTHS]
    print(json.dumps({"replicas": args.replicas, "running": args.running, "results": results}))


if __name__ == "__main__":
    main()
