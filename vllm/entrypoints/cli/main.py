"""The `vllm` command: one module per subcommand, and the exit codes.

A subcommand is a module with `add_parser(subparsers)` and `run(args)`, listed in `_COMMANDS`. It
may have `prepare(words)`, which begins what takes long before the flags are declared, and returns
the context in which the command runs.
Only the module of the command that was given is imported, and it imports torch and the engine
inside `run`, so that `--help` and a bad flag answer at once. `run` may return an exit code; None
is 0.

Exit codes: 0 done, 1 the engine or a request of a batch failed, 2 bad flags, settings or input, 130
interrupted.
"""

import difflib
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.entrypoints.cli.flag_names import with_flags
from vllm.env.bridge import has_vendor_library
from vllm.errors import ConfigError, RequestError, VllmError
from vllm.utils import FlexibleArgumentParser
from vllm.version import __version__

_COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "chat with a model on a running server",
    "complete": "complete text with a model on a running server",
    "bench": "measure throughput and latency",
    "run-batch": "run the requests of a batch file, without a server",
    "generate": "complete prompts, without a server",
    "quantize": "write a quantized checkpoint of a model",
    "calibrate": "measure the FP8 scales of a model",
    "collect-env": "show versions, hardware and settings for a bug report",
    "hpu-check": "self-test of a Gaudi card",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Flag errors and `--help` exit from argparse."""

    words = list(sys.argv[1:] if argv is None else argv)
    parser: FlexibleArgumentParser | None = None

    def run() -> int | None:
        with _prepared(words):
            return run_prepared()

    def run_prepared() -> int | None:
        nonlocal parser
        parser = _create_parser(words)
        if not words:
            parser.print_help()
            return 0
        if (mistake := _find_mistake(words[0])) is not None:
            parser.error(mistake)
        args = parser.parse_args(words)
        code: int | None = args.run(args)
        return code

    return run_command(run, lambda: () if parser is None else parser.flag_names())


def run_command(run: Callable[[], int | None], flag_names: Callable[[], Collection[str]]) -> int:
    """Run a program's main function; return its exit code, or the code of the error it raises.

    Args:
        run: the function.
        flag_names: settings that its command line has flags for, so that an error names the
            flag. Called when there is an error.
    """
    _open_standard_streams()
    if has_vendor_library():
        envs.export_bridge_settings()  # before a command imports torch, which imports the bridge
    try:
        code = run()
    except (ConfigError, RequestError) as error:
        return _fail(error, 2, flag_names())
    except VllmError as error:
        return _fail(error, 1, flag_names())
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has closed it; the interpreter must not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _open_standard_streams() -> None:
    """Open those that the program was started without, as by a supervisor, on the null device.
    Sockets would have their numbers otherwise, and processes that are started get these."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets the lowest number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _prepared(words: Sequence[str]) -> AbstractContextManager[None]:
    """What the command has `prepare` for."""
    name = _given(words)
    prepare = getattr(_module(name), "prepare", None) if name in _COMMANDS else None
    return nullcontext() if prepare is None else prepare(words)


def _given(words: Sequence[str]) -> str:
    """The name of the command, or what is in its place; empty if there is none."""
    return next((word for word in words if not word.startswith("-")), "")


def _module(name: str) -> Any:
    return import_module(f"vllm.entrypoints.cli.{name.replace('-', '_')}")


def _create_parser(words: Sequence[str]) -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(
        prog="vllm",
        description="LLM inference on Gaudi and CPU.",
        epilog="'vllm COMMAND --help' lists the flags of a command. To begin: vllm serve MODEL",
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    given = _given(words)
    for name, text in _COMMANDS.items():
        if name == given:
            command = _module(name)
            command.add_parser(subparsers).set_defaults(run=command.run)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def _find_mistake(word: str) -> str | None:
    """What is wrong with the first word of a command line; None if it may be right."""
    if word in _COMMANDS or word in ("-h", "--help", "-v", "--version"):
        return None
    if word.startswith("-"):
        return f"{word} comes before the command. Flags follow it, as in 'vllm serve {word} ...'"
    if "/" in word or Path(word).is_dir():
        return f"{word!r} is not a command. To serve that model: vllm serve {shlex.quote(word)}"
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    if near:
        return f"{word!r} is not a command. Did you mean 'vllm {near[0]}'?"
    return (
        f"{word!r} is not a command. The commands are {', '.join(_COMMANDS)}. "
        f"To serve a model of that name: vllm serve {shlex.quote(word)}"
    )


def _fail(error: VllmError, code: int, names: Collection[str]) -> int:
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        text = with_flags(text, names)
    sys.stderr.write(f"error: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
