"""Implement `vllm quantize`: write a quantized checkpoint from an unquantized one."""

import argparse

from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_number, add_switch, add_text

DESCRIPTION = (
    "Write a quantized checkpoint of a model, one decoder layer at a time, on the CPU. awq and "
    "gptq measure the model on texts; fp8 and int8 (compressed-tensors, dynamic activations) need "
    "none."
)
USAGE = "vllm quantize --method METHOD --model MODEL [--dataset FILE] --out FOLDER [flags]"
_METHODS = ("awq", "gptq", "fp8", "int8")


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("--method", choices=_METHODS, required=True, help="format to write")
    parser.add_argument(
        "--model", required=True, help="folder or Hugging Face name of the unquantized model"
    )
    add_text(
        parser,
        "--dataset",
        "calibration texts for awq and gptq: a .jsonl or .json file of strings, or of objects "
        "with text, prompt or question; any other file is read as plain text",
        metavar="FILE",
    )
    add_text(parser, "--out", "new folder for the files", metavar="FOLDER", required=True)
    parser.add_argument(
        "--bits",
        type=int,
        choices=(2, 3, 4, 8),
        help=("bits of a quantized value, only for gptq (default: 4)"),
    )
    add_number(
        parser,
        "--group-size",
        "number of inputs that share a scale, for awq and gptq; -1: all",
        128,
    )
    add_switch(
        parser,
        "--desc-act",
        "gptq: quantize the input features with the largest activations first (act-order), which "
        "is more accurate",
    )
    add_number(parser, "--num-samples", "samples to measure", 128)
    add_number(parser, "--sample-tokens", "tokens of a sample", 512)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint. Returns the exit code.

    Raises:
        ConfigError: an argument is out of range.
    """
    for name, least in (("num_samples", 1), ("sample_tokens", 2)):
        given = getattr(args, name)
        if given < least:
            raise ConfigError(f"--{name.replace('_', '-')} {given} must be at least {least}")
    if args.group_size != -1 and not 1 <= args.group_size <= 1 << 16:
        raise ConfigError(f"--group-size {args.group_size} must be -1, or from 1 to 65536")

    from vllm.entrypoints.quantize.run import quantize

    return quantize(args)
