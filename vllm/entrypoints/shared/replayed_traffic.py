"""Convert files with request lengths for `--traffic` to recorded traffic, which is all that an
engine reads.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm import envs
from vllm.errors import ConfigError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

_USUAL_CARD = "gaudi2"


def with_recorded_traffic(args: "EngineArgs") -> "EngineArgs":
    """Return the arguments with recorded traffic for `--traffic`.

    A file with request lengths is replayed on a planned card, in another process. The resulting
    traffic file exists as long as this process.

    Args:
        args: arguments of an engine.

    Raises:
        ConfigError: the file cannot be read, or the engine cannot be planned.
    """
    if args.traffic is None or not _has_card(args):
        return args
    from vllm.planning.request_lengths import is_recorded

    source = Path(args.traffic)
    if is_recorded(source):
        return args
    from vllm.platforms.hpu import simulated_card

    card = simulated_card() or _USUAL_CARD
    handle, path = tempfile.mkstemp(prefix="vllm-traffic-", suffix=".json")
    os.close(handle)
    atexit.register(Path(path).unlink, missing_ok=True)
    logger.info(
        "--traffic %s: a simulation of its requests on a %s chooses the buckets. For another "
        "card use `vllm plan --device CARD --traffic FILE --write-buckets FILE`",
        *(source, card),
    )
    command = [sys.executable, "-m", "vllm.planning.replay_lengths", card, str(source), path]
    try:
        settings = msgspec.json.encode({k: v for k, v in vars(args).items() if v is not None})
    except TypeError as error:
        raise ConfigError(
            f"--traffic {source}: its requests are replayed in another process, to which these "
            f"arguments cannot be sent ({error}). Choose the buckets with `vllm plan --traffic "
            f"FILE --write-buckets FILE`"
        ) from None
    environment = envs.child_environment({}, {"VLLM_BUCKETING_STRATEGY": "linear"})
    done = subprocess.run(
        command, input=settings, stdout=subprocess.PIPE, env=environment, check=False
    )
    if done.returncode:
        reason = done.stdout.decode(errors="replace").strip()
        what = reason or f"the process that replays it ended with {done.returncode}"
        raise ConfigError(f"--traffic {source}: {what}")
    args = copy(args)
    args.traffic = path
    return args


def _has_card(args: "EngineArgs") -> bool:
    """Return whether the engine has buckets; without them its traffic has no effect."""
    from vllm.platforms import resolve_platform

    return resolve_platform(args.device or "auto").name == "hpu"
