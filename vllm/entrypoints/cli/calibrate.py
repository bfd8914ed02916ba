"""`vllm calibrate`: FP8 scales for `--quantization inc`, from a model and a file of texts."""

import argparse
import sys

from vllm.config.inc import SCALE_METHODS
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser

_STEPS = ("prepare", "measure", "postprocess", "unify", "quantize", "evaluate")
_DEVICES = ("g2", "g3")


def add_parser(
    subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]",
) -> FlexibleArgumentParser:
    """Declare the subcommand and return its parser."""
    parser = subparsers.add_parser(
        "calibrate",
        description="Measure a model on texts, and write the scales with which it runs in FP8. A "
        "run that was stopped goes on where it was.",
        usage="vllm calibrate --model MODEL --dataset FILE --out FOLDER [flags]",
    )
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--dataset",
        metavar="FILE",
        help="texts: .jsonl or .json with texts or objects that have a text, prompt or question; "
        "else plain text",
    )
    group.add_argument("--out", metavar="FOLDER", required=True, help="folder for the files")
    group.add_argument("--step", choices=_STEPS, help="do one step again (default: all in order)")
    group.add_argument(
        "--device-for-scales",
        choices=_DEVICES,
        help="card that the scales are for, Gaudi 2 or 3 (default: that of this machine, or g3)",
    )
    group.add_argument(
        "--scale-method",
        choices=SCALE_METHODS[:-2],
        default="maxabs_hw",
        help="how scales follow from what was measured (default: maxabs_hw)",
    )
    group.add_argument(
        "--block",
        action="append",
        default=[],
        metavar="NAME",
        help="regular expression for a part of the name of modules that stay as they are; may be "
        "repeated",
    )
    for name, default, text in (
        ("--num-samples", 512, "samples to measure"),
        ("--sample-tokens", 1024, "tokens of a sample"),
        ("--output-tokens", 32, "tokens to generate after each sample"),
        ("--batch-size", 32, "samples at a time"),
    ):
        group.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--unify-ranks", type=int, metavar="N", help="make the scales for N devices, fewer than ran"
    )
    return EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> None:
    """Calibrate, and print what to run then."""
    from vllm.entrypoints.calibration.folder import CalibrationFolder
    from vllm.entrypoints.calibration.run import STEPS, Calibration, CalibrationSettings

    assert STEPS == _STEPS
    for name in ("num_samples", "sample_tokens", "output_tokens", "batch_size"):
        if getattr(args, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    engine = EngineArgs.from_cli_args(args)
    model = engine.model or engine.create_engine_config().model.resolved_path
    folder = CalibrationFolder(args.out, model, _device(args, engine))
    settings = CalibrationSettings(
        dataset=args.dataset,
        num_samples=args.num_samples,
        sample_tokens=args.sample_tokens,
        output_tokens=args.output_tokens,
        batch_size=args.batch_size,
        scale_method=args.scale_method,
        blocked=tuple(args.block),
        unify_ranks=args.unify_ranks,
    )

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    steps = STEPS if args.step is None else (args.step,)
    state = Calibration(engine, folder, settings, say).run(steps)
    if "evaluate" in state["done"]:
        found = state["perplexity"]
        change = 100 * (found["after"] / found["before"] - 1)
        sys.stdout.write(
            f"perplexity: {found['before']:.4f} before, {found['after']:.4f} after "
            f"({change:+.2f} %)\n"
        )
    if "quantize" in state["done"]:
        ranks = args.unify_ranks or engine.tensor_parallel_size
        sys.stdout.write(
            f"QUANT_CONFIG={folder.quant_config} vllm serve {model} --quantization inc "
            f"--kv-cache-dtype fp8_inc{f' --tensor-parallel-size {ranks}' if ranks > 1 else ''}\n"
        )


def _device(args: argparse.Namespace, engine: EngineArgs) -> str:
    """The card that scales are for."""
    from vllm.platforms import resolve_platform
    from vllm.platforms.hpu import HPUPlatform

    if args.device_for_scales is not None:
        return str(args.device_for_scales)
    platform = resolve_platform(engine.device)
    if isinstance(platform, HPUPlatform):
        return "g2" if platform.bridge.device_name == "GAUDI2" else "g3"
    return "g3"
