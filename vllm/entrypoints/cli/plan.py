"""`vllm plan`: the memory, buckets and start of an engine, without its device and its weights."""

import argparse
import json
import logging
import sys
from typing import Any

from vllm import envs
from vllm.cost_model.cards import CARDS
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser

DEVICES = (*CARDS, "cpu")


def add_parser(
    subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]",
) -> FlexibleArgumentParser:
    """Declare the subcommand and return its parser."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser

    parser = subparsers.add_parser(
        "plan",
        description="Show the memory, the buckets and the warm-up of a model on a device that this "
        "machine need not have. Reads config.json, or the header of a GGUF file, and no weights. "
        "Takes the flags of 'vllm serve'.",
        usage="vllm plan MODEL --device gaudi2|gaudi3|cpu [flags]",
        conflict_handler="resolve",
    )
    make_arg_parser(parser)
    group = parser.add_argument_group("Plan")
    group.add_argument("--device", help=f"device to plan for: {', '.join(DEVICES)}")
    group.add_argument(
        "--num-cards",
        metavar="N",
        help="cards that share each layer; the same as --tensor-parallel-size",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code."""
    device = _device(args.device)
    num_cards = _num_cards(args)
    # A card of this machine is not opened: its library would take the device name "hpu".
    envs.export("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    logging.getLogger("vllm").setLevel(logging.WARNING)

    from vllm.entrypoints.openai.cli_args import exit_after_help, read_args
    from vllm.planning.plan import make_plan
    from vllm.planning.text import plan_lines

    args.device = None
    engine_args, server_args = read_args(args)
    exit_after_help(server_args)
    plan = make_plan(engine_args, device, num_cards)
    lines = [json.dumps(plan.as_json())] if args.json else plan_lines(plan)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _device(name: str | None) -> str:
    """
    Raises:
        ConfigError: there is no such device.
    """
    accepted = ", ".join(DEVICES)
    if name is None:
        raise ConfigError(f"--device is missing: the device to plan for, one of {accepted}")
    if name not in DEVICES:
        raise ConfigError(f"--device {name} is not known; accepted: {accepted}")
    return name


def _num_cards(args: argparse.Namespace) -> int:
    """
    Raises:
        ConfigError: it is no positive number, or given twice with different values.
    """
    given: Any = args.num_cards
    tensor: Any = args.tensor_parallel_size
    if given is None:
        return 1 if tensor is None else int(tensor)
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"--num-cards {given} must be a number of at least 1")
    if tensor is not None and int(tensor) != int(given):
        raise ConfigError(
            f"--num-cards {given} and --tensor-parallel-size {tensor} are the same setting. Leave "
            f"one of them out"
        )
    return int(given)
