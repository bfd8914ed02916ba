"""Share code between the benchmarks without a server."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.arguments import add_number, add_switch, add_text

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


def make_llm(args: argparse.Namespace) -> "LLM":
    """Create the engine that the flags describe."""
    from vllm import LLM

    return LLM(**vars(EngineArgs.from_cli_args(args)))


def sampling(num_tokens: int, args: argparse.Namespace) -> "SamplingParams":
    """Return sampling parameters for exactly `num_tokens` tokens, without detokenisation."""
    from vllm import SamplingParams

    return SamplingParams(
        n=args.n,
        temperature=args.temperature,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=not args.disable_detokenize,
    )


def facts(llm: "LLM") -> dict[str, Any]:
    """Return what a result depends on: model, device, threads."""
    import torch

    config = llm.llm_engine.vllm_config
    return {
        "model": str(config.model.model),
        "dtype": config.model.dtype,
        "device": config.device.device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags that both benchmarks have, and the flags of the engine."""
    group = parser.add_argument_group("requests")
    group.add_argument("--n", type=int, default=1, metavar="N", help="outputs per prompt")
    add_number(group, "--temperature", "sampling temperature (default: 0, greedy)", 0.0)
    add_switch(group, "--disable-detokenize", "do not detokenise the outputs")
    add_text(parser, "--output-json", "write the result as JSON; - is stdout", metavar="FILE")
    EngineArgs.add_cli_args(parser)
