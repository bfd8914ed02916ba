"""Writes error messages for a command line: `--max-model-len` for `max_model_len`.

The engine's errors name the keywords of `LLM()`. For users of the command line they name flags.
"""

import re
from collections.abc import Collection

from vllm.utils.arguments import flag_of

_VALUE = r"=(?P<quote>'?)(?P<value>[^\s':,;]+)(?P=quote)(?=[\s:,;.]|$)"
_NOTHING = "(?!)"


def with_flags(message: str, names: Collection[str]) -> str:
    """The message with flags in place of the names of settings.

    A name with an underscore is always replaced; another name, such as `port`, only before `=` or
    at the beginning, because it may be a word of the sentence.

    Args:
        message: of an error.
        names: of the settings that have a flag.

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
