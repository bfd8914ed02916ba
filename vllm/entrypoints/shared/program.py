"""Run the main function of a program, and turn its errors into one line for the user and an exit
code.

Exit codes: 0 done, 1 the engine or a request of a batch failed, 2 bad flags, settings or input, 130
interrupted.

The engine's errors name the keywords of `LLM()`, such as `max_model_len`. For users of the command
line they are replaced by flags: `--max-model-len`.
"""

import os
import re
import sys
from collections.abc import Callable, Collection

from vllm import envs
from vllm.env.bridge import has_vendor_library
from vllm.errors import ConfigError, RequestError, VllmError
from vllm.utils.arguments import flag_of

_VALUE = r"=(?P<quote>'?)(?P<value>[^\s':,;]+)(?P=quote)(?=[\s:,;.]|$)"
_NOTHING = "(?!)"


def run_command(run: Callable[[], int | None], flag_names: Callable[[], Collection[str]]) -> int:
    """Run a program's main function, and return its exit code or the code of the error that it
    raises.

    Args:
        run: the function.
        flag_names: returns the settings for which the command line has flags, so that an error
            names the flag. Called only after an error.
    """
    _open_standard_streams()
    if has_vendor_library():
        # Set before a command imports torch, which imports the bridge.
        envs.export_bridge_settings()
    try:
        code = run()
    except (ConfigError, RequestError) as error:
        return _fail(error, 2, flag_names())
    except VllmError as error:
        return _fail(error, 1, flag_names())
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has closed the pipe. Redirect stdout, so that the interpreter
        # does not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _open_standard_streams() -> None:
    """Open missing standard streams on the null device, if the program was started without them,
    for example by a supervisor.

    Otherwise sockets would get their descriptor numbers, and child processes would inherit these.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `os.open` returns the lowest free number, which is the closed descriptor.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _fail(error: VllmError, code: int, names: Collection[str]) -> int:
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        text = with_flags(text, names)
    sys.stderr.write(f"error: {text}\n")
    return code


def with_flags(message: str, names: Collection[str]) -> str:
    """Return the message with flags instead of the names of settings.

    A name with an underscore is always replaced; another name, such as `port`, only before `=` or
    at the beginning, because it may be a word of the sentence.

    Args:
        message: message of an error.
        names: names of the settings that have a flag.

    >>> with_flags("max_num_seqs must be at least 1", ["max_num_seqs"])
    '--max-num-seqs must be at least 1'
    >>> with_flags("quantization='x' is not available", ["quantization"])
    '--quantization x is not available'
    >>> with_flags("enable_lora=True: not available", ["enable_lora"])
    '--enable-lora: not available'
    """
    if not names:
        return message
    long = "|".join(name for name in sorted(names) if "_" in name) or _NOTHING
    short = "|".join(name for name in sorted(names) if "_" not in name) or _NOTHING
    before, after = r"(?<![\w./'\"\-])", r"(?![\w.])"
    pattern = re.compile(
        rf"{before}(?P<name>(?:{long}){after}|(?:{short})(?==)|^(?:{short})(?= must| needs))"
        rf"(?:{_VALUE}|(?P<equals>=)(?=['\[{{A-Z]))?"
    )
    return pattern.sub(_to_flag, message)


def _to_flag(match: "re.Match[str]") -> str:
    flag = flag_of(match["name"])
    value = match["value"]
    if value is None:
        return flag + (" " if match["equals"] else "")
    if value == "False":
        return f"--no-{flag[2:]}"
    return flag if value == "True" else f"{flag} {value}"
