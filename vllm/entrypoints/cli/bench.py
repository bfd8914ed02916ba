"""Implement `vllm bench`: measure a server, or the engine without a server."""

import argparse
from importlib import import_module

from vllm.utils import FlexibleArgumentParser

DESCRIPTION = "Measure throughput and latency."
_BENCHMARKS = {
    "serve": "send requests to a running server; report throughput and latency",
    "latency": "measure the latency of one batch, without a server",
    "throughput": "measure the throughput of many prompts, without a server",
}


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.set_defaults(print_help=parser.print_help)
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK")
    for name, text in _BENCHMARKS.items():
        description, usage = text.capitalize() + ".", f"vllm bench {name} [flags]"
        benchmark = benchmarks.add_parser(name, help=text, description=description, usage=usage)
        import_module(f"vllm.entrypoints.bench.{name}").add_cli_args(benchmark)


def run(args: argparse.Namespace) -> int | None:
    """Run one benchmark, or list the benchmarks. Returns the exit code."""
    if args.benchmark is None:
        args.print_help()
        return 0
    return import_module(f"vllm.entrypoints.bench.{args.benchmark}").run(args)
