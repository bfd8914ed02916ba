"""Implement `vllm calibrate`: compute FP8 scales for `--quantization inc`, from a model and a file
of texts.
"""

import argparse
import sys

from vllm.config.families import FAMILIES
from vllm.config.quantization.inc import MEASURED_SCALE_METHODS
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.calibration.steps import STEPS, Step
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_number, add_text

DESCRIPTION = (
    "Measure a model on texts, and write the scales that it needs to run in FP8. If a run was "
    "stopped, the next one continues at the same step."
)
USAGE = "vllm calibrate --model MODEL --dataset FILE --out FOLDER [flags]"
_STEP_NUMBERS = {
    step.script_number: name for name, step in STEPS.items() if step.script_number is not None
}
_DEVICES = ("g2", "g3")


def _blocked_by_default() -> str:
    """Describe which modules are left unquantized by default, for the help text."""
    families: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES.values():
        if family.fp8_scales.blocked:
            families.setdefault(family.fp8_scales.blocked, []).append(family.model_type)
    return "; ".join(
        f"{', '.join(names)} for {' and '.join(types)}" for names, types in families.items()
    )


def _step_help(step: Step) -> str:
    number = "" if step.script_number is None else f" ({step.script_number})"
    only_with = "" if step.flag is None else f" (only with {step.flag} N)"
    return f"{step.name}{number} to {step.does.replace('`', '')}{only_with}"


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare the flags of the command."""
    group = parser.add_argument_group("calibration")
    add_text(
        group,
        ("-d", "--dataset"),
        "calibration texts: a .jsonl or .json file of strings, or of objects with text, prompt or "
        "question; any other file is read as plain text",
        metavar="FILE",
    )
    add_text(group, ("-o", "--out"), "folder for the files", metavar="FOLDER", required=True)
    group.add_argument(
        "--step",
        choices=(*STEPS, *sorted(_STEP_NUMBERS)),
        help="do one step again, by its name or by its number in the scripts for Gaudi: "
        f"{'; '.join(map(_step_help, STEPS.values()))} (default: all in order)",
    )
    group.add_argument(
        "--device-for-scales",
        choices=_DEVICES,
        help="card of the scales, Gaudi 2 or 3 (default: the card of this machine, or g3)",
    )
    group.add_argument(
        "--scale-method",
        choices=MEASURED_SCALE_METHODS,
        default="maxabs_hw",
        help="method that computes scales from the measured ranges (default: maxabs_hw)",
    )
    group.add_argument(
        "--block",
        action="append",
        default=[],
        metavar="NAME",
        help="do not quantize modules if a part of their name matches this regular expression; "
        f"may be repeated (default: {_blocked_by_default()}, else none)",
    )
    add_number(group, ("-l", "--num-samples"), "samples to measure", 512)
    add_number(group, "--sample-tokens", "tokens of a sample", 1024)
    add_number(group, "--output-tokens", "tokens to generate after each sample", 32)
    add_number(group, ("-b", "--batch-size"), "samples at a time", 32)
    add_number(
        group,
        ("-r", "--unify-ranks"),
        "make the scales for N devices, which are fewer than were measured",
    )
    group.add_argument(
        *("-u", "--unify-experts"),
        action="store_true",
        help="the measured devices had different experts, not parts of the same experts (default: "
        "on with --enable-expert-parallel)",
    )
    add_number(
        group,
        ("-w", "--expand-ranks"),
        "make the scales for N devices, which are more than were measured; the experts are divided "
        "among them",
    )
    group.add_argument(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        help="on a card, warm up all buckets each time that an engine starts (default: no, unless "
        "VLLM_SKIP_WARMUP=false is set; the flag overrides the variable)",
    )
    EngineArgs.add_cli_args(parser)
    # Short flags that the calibration scripts for Gaudi use.
    for name, flag, options in (
        ("-m", "model", {"metavar": "MODEL"}),
        ("-t", "tensor_parallel_size", {"type": int, "metavar": "N"}),
        ("-e", "enforce_eager", {"action": "store_true"}),
    ):
        help_text = f"--{flag.replace('_', '-')}"
        group.add_argument(name, dest=flag, default=argparse.SUPPRESS, help=help_text, **options)


def run(args: argparse.Namespace) -> None:
    """Calibrate, and print the commands to run next."""
    from vllm.entrypoints.calibration.folder import CalibrationFolder
    from vllm.entrypoints.calibration.run import Calibration, CalibrationSettings

    for name in ("num_samples", "sample_tokens", "output_tokens", "batch_size"):
        if getattr(args, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    if args.unify_ranks is not None and args.expand_ranks is not None:
        raise ConfigError("--unify-ranks and --expand-ranks cannot be used together; leave one out")
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
        unify_experts=args.unify_experts,
        expand_ranks=args.expand_ranks,
        warms_up=args.warmup,
    )

    def print_line(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    step = _STEP_NUMBERS.get(args.step, args.step)
    state = Calibration(engine, folder, settings, print_line).run(step)
    if "evaluate" in state["done"]:
        found = state["perplexity"]
        change = 100 * (found["after"] / found["before"] - 1)
        sys.stdout.write(
            f"perplexity: {found['before']:.4f} before, {found['after']:.4f} after "
            f"({change:+.2f} %)\n"
        )
    if "quantize" in state["done"]:
        ranks = settings.other_ranks or engine.tensor_parallel_size
        more = f" --tensor-parallel-size {ranks}" if ranks > 1 else ""
        stages = engine.pipeline_parallel_size
        more += f" --pipeline-parallel-size {stages}" if stages > 1 else ""
        if getattr(args, "weights_load_device", None) is not None:
            more += f" --weights-load-device {args.weights_load_device}"
        sys.stdout.write(
            f"QUANT_CONFIG={folder.quant_config} vllm serve {model} --quantization inc "
            f"--kv-cache-dtype fp8_inc{more}\n"
        )


def _device(args: argparse.Namespace, engine: EngineArgs) -> str:
    """Return the kind of Gaudi card for which scales are computed."""
    from vllm.platforms import resolve_platform
    from vllm.platforms.hpu import HPUPlatform

    if args.device_for_scales is not None:
        return str(args.device_for_scales)
    platform = resolve_platform(engine.device)
    if isinstance(platform, HPUPlatform):
        return "g2" if platform.bridge.device_name == "GAUDI2" else "g3"
    return "g3"
