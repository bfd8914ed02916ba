"""Computes the traffic that requests of known lengths cause in an engine, as a separate program.

    python -m vllm.planning.replay_lengths CARD REQUESTS OUTPUT < SETTINGS.json

The settings are the fields of `EngineArgs`. A planned engine replaces the device `hpu` in its
process, so an engine that is about to start runs this in another process.
"""

import logging
import sys
from copy import copy
from pathlib import Path

import msgspec

from vllm.bucketing import Bucket
from vllm.bucketing.catalog.bucket_plan import BucketPlan
from vllm.bucketing.traffic import TrafficTable
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.planning.engine_plan import make_engine_plan
from vllm.planning.engine_throughput import serving_cost
from vllm.planning.replay import replay
from vllm.planning.request_lengths import RequestLengths, read_lengths
from vllm.planning.traffic import bucket_seconds, shape_seconds


def replayed_table(args: EngineArgs, card: str, requests: RequestLengths) -> TrafficTable:
    """Return the sizes of the forward passes that requests need, by replaying them.

    Args:
        args: arguments of the engine; its buckets are the ones without traffic.
        card: a key of `cost_model.cards.CARDS`.
        requests: requests to replay.

    Raises:
        ConfigError: the engine cannot start with these arguments.
    """
    args = copy(args)
    args.traffic = args.device = None
    engine = make_engine_plan(args, card, args.tensor_parallel_size or 1)
    seconds = shape_seconds(serving_cost(engine), engine.config.cache.block_size)

    def seconds_of(bucket: Bucket) -> float:
        return bucket_seconds([bucket], seconds)[0]

    plan = BucketPlan(engine.catalog, engine.limits, (), ())
    return replay(engine.config, engine.report.num_blocks, plan, requests, seconds_of).table


def main(card: str, requests: str, output: str) -> int:
    """Replay the requests of a file and write the traffic table to another; return the
    exit code.
    """
    try:
        args = EngineArgs(**msgspec.json.decode(sys.stdin.buffer.read()))
        replayed_table(args, card, read_lengths(Path(requests))).save(Path(output))
    except ConfigError as error:
        sys.stdout.write(str(error))
        return 2
    return 0


if __name__ == "__main__":
    logging.getLogger("vllm").setLevel(logging.WARNING)
    sys.exit(main(*sys.argv[1:]))
