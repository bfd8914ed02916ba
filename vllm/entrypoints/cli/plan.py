"""Implement `vllm plan`: predict the memory, buckets and start of an engine, without its device and
weights.
"""

import argparse
import dataclasses
import json
import logging
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.cost_model.cards import CARDS
from vllm.cost_model.measured import Measured, read_measured
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.planning.card_search import FoundCards
    from vllm.planning.engine_plan import EnginePlan
    from vllm.planning.request_lengths import RequestLengths
    from vllm.planning.throughput.goals import Goals
    from vllm.planning.traffic import Traffic

DESCRIPTION = (
    "Show the memory, the buckets and the warm-up of a model on a device, which does not have to "
    "be in this machine. Reads only config.json, or the header of a GGUF file. Takes the flags of "
    "'vllm serve'."
)
USAGE = "vllm plan MODEL --device gaudi2|gaudi3|cpu [flags]"
DEVICES = (*CARDS, "cpu")
_LENGTHS = {"input": 1024, "output": 128}
"""Tokens of a request by the beginning of their flag."""
_MAX_GIB = 2**20
_BUDGETS = {
    "--warm-up-budget": "seconds above 0, such as 60",
    "--graph-budget": "GiB above 0, such as 4",
}
"""Flag -> accepted values."""
_MIN_RATE, _MAX_RATE = 1e-4, 1e6


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser

    parser.conflict_handler = "resolve"
    make_arg_parser(parser)
    group = parser.add_argument_group("Plan")
    group.add_argument("--device", help=f"device to plan for: {', '.join(DEVICES)}")
    group.add_argument(
        "--num-cards",
        metavar="N",
        help="number of cards over which each layer is split; the same as --tensor-parallel-size",
    )
    group.add_argument(
        "--host-memory",
        metavar="GIB",
        help="memory of the planned machine in GiB, only with --device cpu (default: the memory of "
        "this machine)",
    )
    group.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    group.add_argument(
        "--html",
        metavar="FILE",
        help="write the plan with charts to an HTML file, which works offline",
    )
    group.add_argument(
        "--measured",
        metavar="FILE",
        help=(
            "file with the measured speed of a card of this kind, written by 'vllm hpu-check "
            "--save FILE' or by an engine with --record-traffic FILE"
        ),
    )
    group.add_argument(
        "--traffic",
        metavar="FILE",
        help=(
            "choose the buckets (--num-buckets for each phase) for this traffic: a file that "
            "--record-traffic has written, or a CSV or JSON Lines file of request lengths with "
            "input_tokens, output_tokens and optionally timestamp"
        ),
    )
    group.add_argument(
        "--warm-up-budget",
        type=float,
        metavar="S",
        help=(
            "choose as many buckets for --traffic as can be compiled, run and captured in S "
            "seconds (default: no limit; --num-buckets for each phase)"
        ),
    )
    group.add_argument(
        "--graph-budget",
        type=float,
        metavar="GIB",
        help=(
            "choose as many buckets for --traffic as have HPU graphs of at most GIB together "
            "(default: no limit; --num-buckets for each phase)"
        ),
    )
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help=(
            "replay the requests of --traffic at R per second (default: at the times of the "
            "file, or all at once if it has none)"
        ),
    )
    group.add_argument(
        "--write-buckets",
        metavar="FILE",
        help="write the buckets for --traffic to a file for VLLM_BUCKETING_FROM_FILE",
    )
    _add_goals(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code."""
    device, host_bytes = _device(args.device), _host_bytes(args)
    _check_num_cards(args.num_cards)
    for name in ("traffic", "html", "measured", "write_buckets"):
        if getattr(args, name) == "":
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} must be the name of a file, got ''")
    # Do not load the Gaudi library, even if it is installed: it would claim the device name "hpu".
    envs.export("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    log = logging.getLogger("vllm")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        return _plan(args, device, host_bytes)
    except ConfigError as error:
        if args.num_cards is None:
            raise
        raise ConfigError(_in_cards(str(error))) from error
    finally:
        log.setLevel(level)


def _in_cards(message: str) -> str:
    """Replace the engine's flag for the number of cards by the flag of this command in an error
    message.
    """
    return re.sub(r"--tensor-parallel-size|\btensor_parallel_size\b", "--num-cards", message)


def _plan(args: argparse.Namespace, device: str, host_bytes: int | None) -> int:
    """Print the plan, and return the exit code."""
    from vllm.entrypoints.openai.cli_args import exit_after_help, read_args
    from vllm.entrypoints.pages.plan_page import plan_page
    from vllm.planning.budgets import bucket_budget
    from vllm.planning.card_search import found_lines, found_object, serve_command
    from vllm.planning.engine_throughput import serving_cost
    from vllm.planning.fit import planned_or_nearest
    from vllm.planning.plan import describe, make_plan
    from vllm.planning.text import plan_lines, wrapped
    from vllm.planning.traffic import plan_traffic, read_traffic

    args.device = None
    source = args.traffic
    traffic = None if source is None else read_traffic(_traffic_path(source, device))
    if args.request_rate is not None:
        traffic = _at_rate(traffic, args.request_rate)
    if envs.get().VLLM_BUCKETING_STRATEGY != "optimal":
        args.traffic = None  # a plan for given buckets does not depend on the traffic
    if traffic is None and args.write_buckets is not None:
        raise ConfigError(
            f"--write-buckets {args.write_buckets} needs --traffic FILE, the traffic for which "
            "buckets are chosen"
        )
    _check_budgets(args, has_traffic=traffic is not None)
    flags = _given_flags(args)
    engine_args, server_args = read_args(args)
    exit_after_help(server_args)
    num_cards = _num_cards(args.num_cards, engine_args.tensor_parallel_size)
    measured = None if args.measured is None else _measured(args.measured, device)
    goals = _goals(args)
    found = _search(args, engine_args, device, num_cards, measured, goals, traffic)
    engine = None if found is None else found.plan
    if engine is None and device in CARDS:
        engine = planned_or_nearest(engine_args, device, num_cards)
    if engine is None:
        plan = make_plan(engine_args, device, num_cards, host_bytes)
    else:
        plan = describe(engine, device, measured)
    as_json, lines = plan.as_json(), [*wrapped(plan_lines(plan))]
    if found is not None:
        command = serve_command(found, plan.model, flags)
        as_json["goals"] = found_object(found, command)
        lines += ["", *wrapped(found_lines(found)), "To serve it:", command]
    if traffic is not None and engine is not None:
        fitted = None if measured is None else measured.fitted
        count, cost = engine.config.hpu.num_buckets, serving_cost(engine, fitted)
        budget = bucket_budget(engine, args.warm_up_budget, args.graph_budget)
        buckets = plan_traffic(engine, traffic, source, count, cost, goals, budget)
        as_json["traffic"] = buckets.as_json()
        lines += ["", *wrapped(buckets.lines())]
        if args.write_buckets is not None:
            _write("--write-buckets", args.write_buckets, buckets.file_text())
    if args.html is not None:
        _write("--html", args.html, plan_page(as_json))
    if args.json:
        lines = [json.dumps(as_json)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _write(flag: str, path: str, text: str) -> None:
    """Write the file that a flag names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written: {error.strerror}. Name a file in a folder that "
            f"exists and can be written"
        ) from None


def _traffic_path(source: str, device: str) -> Path:
    """Return the path of --traffic.

    Raises:
        ConfigError: the device has no buckets, so it cannot use traffic.
    """
    if device not in CARDS:
        raise ConfigError(f"--traffic needs a card: --device {device} has no buckets")
    return Path(source)


def _check_budgets(args: argparse.Namespace, *, has_traffic: bool) -> None:
    """Check the flags that limit the buckets for a traffic.

    Raises:
        ConfigError: there is no traffic, several are given, or a budget is not a positive number.
    """
    names = ("num_buckets", "warm_up_budget", "graph_budget")
    values = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    given = [f"{flag} {value:g}" for flag, value in values.items() if value is not None]
    if given and not has_traffic:
        raise ConfigError(
            f"{given[0]} needs --traffic FILE, the traffic for which buckets are chosen"
        )
    for flag, accepted in _BUDGETS.items():
        value = values[flag]
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag} {value:g} must be a number of {accepted}")
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)} limit the same buckets. Give only one of these flags"
        )


def _at_rate(traffic: "Traffic | None", rate: float) -> "RequestLengths":
    """Return the requests of a recorded traffic at another request rate.

    Raises:
        ConfigError: the rate is not a positive number, or there are no requests.
    """
    from vllm.planning.request_lengths import RequestLengths

    if not isinstance(traffic, RequestLengths):
        raise ConfigError(
            f"--request-rate {rate:g} needs --traffic with lengths of requests: only requests are "
            f"replayed"
        )
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise ConfigError(
            f"--request-rate must be a number of requests per second between "
            f"{_MIN_RATE:g} and {_MAX_RATE:g}, got {rate:g}"
        )
    return traffic.at_rate(rate)


def _add_goals(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the search for a number of cards."""
    group = parser.add_argument_group(
        "Goals",
        "Shows the smallest number of cards (1, 2, 4 or 8; or only --num-cards) that meets all "
        "goals, the largest --max-num-seqs for these cards, and the command that serves the model "
        "in this way. With --traffic of request lengths, also the highest rate of them at which "
        "90 %% of the requests meet --goal-ttft and --goal-tpot.",
    )
    group.add_argument("--goal-ttft", type=float, metavar="MS", help="maximum time to first token")
    group.add_argument(
        "--goal-tpot", type=float, metavar="MS", help="maximum time per output token"
    )
    group.add_argument(
        "--goal-tokens-per-s", type=float, metavar="N", help="minimum output tokens per second"
    )
    for name, default in _LENGTHS.items():
        group.add_argument(
            f"--{name}-len",
            type=int,
            metavar="N",
            help=f"{name} tokens of each request (default: the mean of --traffic, or {default})",
        )


def _measured(path: str, device: str) -> Measured:
    """Read the measured rates of a card from a file.

    Raises:
        ConfigError: they are not rates of such a card.
    """
    if device not in CARDS:
        raise ConfigError(f"--measured needs a card, one of {', '.join(CARDS)}; got {device}")
    try:
        return read_measured(Path(path), device)
    except ConfigError as error:
        raise ConfigError(f"--measured {error}") from None


def _goals(args: argparse.Namespace) -> "Goals | None":
    """Return the goals of the search; None if no goal is given.

    Raises:
        ConfigError: a goal is wrong.
    """
    from vllm.planning.throughput.goals import Goals

    goals = Goals(
        ttft_ms=args.goal_ttft, tpot_ms=args.goal_tpot, tokens_per_s=args.goal_tokens_per_s
    )
    return goals if goals.given else None


def _mean_lengths(traffic: "Traffic") -> dict[str, int]:
    """Return the mean numbers of input and output tokens of a request."""
    from vllm.planning.request_lengths import RequestLengths

    if not isinstance(traffic, RequestLengths):
        return _LENGTHS
    columns = {"input": traffic.num_inputs, "output": traffic.num_outputs}
    return {name: max(1, round(float(values.mean()))) for name, values in columns.items()}


def _search(
    args: argparse.Namespace,
    engine_args: "EngineArgs",
    device: str,
    num_cards: int,
    measured: Measured | None,
    goals: "Goals | None",
    traffic: "Traffic | None",
) -> "FoundCards | None":
    """Search for the cards that meet the goals; None without goals.

    Raises:
        ConfigError: a goal or a length is wrong, or no number of cards can hold the model.
    """
    from vllm.cost_model.cards import NUMBERS_OF_CARDS
    from vllm.planning.card_search import search_cards
    from vllm.planning.engine_plan import make_engine_plan
    from vllm.planning.fit import excess
    from vllm.planning.throughput.goals import KINDS
    from vllm.planning.throughput.prediction import Lengths

    given = {name: getattr(args, f"{name}_len") for name in _LENGTHS}
    if goals is None:
        *flags, last = (kind.flag for kind in KINDS.values())
        for name, size in given.items():
            if size is not None:
                raise ConfigError(
                    f"--{name}-len {size} has no effect without a goal: give {', '.join(flags)} or "
                    f"{last}"
                )
        return None
    if device not in CARDS:
        raise ConfigError(
            f"goals need a card whose speed is known: --device {device} is not one of "
            f"{', '.join(CARDS)}"
        )
    usual = _LENGTHS if traffic is None else _mean_lengths(traffic)
    sizes = {name: usual[name] if size is None else size for name, size in given.items()}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"--{name}-len must be at least 1, got {size}")

    def make_plan(num_cards: int, max_num_seqs: int | None) -> "EnginePlan":
        changes: dict[str, Any] = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
        try:
            return make_engine_plan(dataclasses.replace(engine_args, **changes), device, num_cards)
        except ConfigError as error:
            found = excess(engine_args, device, num_cards)
            raise ConfigError(found or _in_cards(str(error))) from error

    is_given = args.num_cards is not None or args.tensor_parallel_size is not None
    is_given = is_given or num_cards > 1  # set in the file of --config
    return search_cards(
        make_plan,
        goals,
        Lengths(sizes["input"], sizes["output"]),
        numbers_of_cards=(num_cards,) if is_given else NUMBERS_OF_CARDS,
        fitted=None if measured is None else measured.fitted,
    )


_OWN_FLAGS = {
    *("device", "num_cards", "host_memory", "json", "html", "measured"),
    *("traffic", "request_rate", "write_buckets", "warm_up_budget", "graph_budget"),
    *("input_len", "output_len", "run", "command"),
    *("goal_ttft", "goal_tpot", "goal_tokens_per_s"),
    *("model", "model_tag", "tensor_parallel_size", "max_num_seqs"),
}
"""Flags that are not flags of `vllm serve`, or that the search sets itself."""


def _given_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of `vllm serve` that were given."""
    words: list[str] = []
    for name, value in vars(args).items():
        flag = name.replace("_", "-")
        if value is None or name in _OWN_FLAGS:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{flag}", text]
    return words


def _device(name: str | None) -> str:
    """Return the device to plan for.

    Raises:
        ConfigError: the device is unknown.
    """
    accepted = ", ".join(DEVICES)
    if name is None:
        raise ConfigError(f"--device is missing: the device to plan for, one of {accepted}")
    if name not in DEVICES:
        raise ConfigError(f"--device {name} is not known; accepted: {accepted}")
    return name


def _check_num_cards(given: str | None) -> None:
    """Check --num-cards.

    Raises:
        ConfigError: the value is not a positive integer.
    """
    if given is not None and (not given.isdecimal() or int(given) < 1):
        raise ConfigError(f"--num-cards must be an integer of at least 1, got {given}")


def _num_cards(given: str | None, tensor: int) -> int:
    """Return the number of cards among which each layer is divided.

    Args:
        given: value of --num-cards.
        tensor: value of the engine's flag or config file; 1: not set.

    Raises:
        ConfigError: both are given, with different values.
    """
    if given is None:
        return tensor
    if tensor not in (1, int(given)):
        raise ConfigError(
            f"--num-cards {given} and -tp {tensor} are the same setting. Leave one of them out"
        )
    return int(given)


def _host_bytes(args: argparse.Namespace) -> int | None:
    """Return the value of --host-memory in bytes; None if it is not given.

    Raises:
        ConfigError: it is not a positive number of GiB, or the device is a card.
    """
    text: Any = args.host_memory
    if text is None:
        return None
    if args.device != "cpu":
        raise ConfigError(
            "--host-memory must be given with --device cpu only: the memory of a card is known"
        )
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < _MAX_GIB:
        raise ConfigError(f"--host-memory {text} must be a number of GiB above 0, such as 64")
    return int(size * 2**30)
