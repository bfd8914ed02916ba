"""Error messages in the words of a command line: `--max-model-len` for `max_model_len`.

The engine's errors name the keywords of `LLM()`. Whoever typed flags is told flags.
"""

import re
from functools import cache

_VALUE = r"=(?P<quote>'?)(?P<value>[^\s':,;]+)(?P=quote)(?=[\s:,;.]|$)"


def with_flags(message: str) -> str:
    """The message with flags in place of the names of settings.

    A name with an underscore is always one; another name, such as `port`, only before `=` or at
    the beginning, since it may be a word of the sentence.

    >>> with_flags("max_num_seqs must be an integer of at least 1, got 0")
    '--max-num-seqs must be an integer of at least 1, got 0'
    >>> with_flags("tensor_parallel_size=2: this version runs on one device")
    '--tensor-parallel-size 2: this version runs on one device'
    >>> with_flags("quantization='x' is not available")
    '--quantization x is not available'
    >>> with_flags("enable_lora=True: not available")
    '--enable-lora: not available'
    """
    return _pattern().sub(_to_flag, message)


def _to_flag(match: "re.Match[str]") -> str:
    flag = "--" + match["name"].replace("_", "-")
    value = match["value"]
    if value is None:
        return flag + (" " if match["equals"] else "")
    if value == "False":
        return f"--no-{flag[2:]}"
    return flag if value == "True" else f"{flag} {value}"


@cache
def _pattern() -> "re.Pattern[str]":
    from vllm.entrypoints.openai.cli_args import known_names

    names = known_names()
    long = "|".join(name for name in names if "_" in name)
    short = "|".join(name for name in names if "_" not in name)
    before, after = r"(?<![\w./'\"\-])", r"(?![\w.])"
    return re.compile(
        rf"{before}(?P<name>(?:{long}){after}|(?:{short})(?==)|^(?:{short})(?= must| needs))"
        rf"(?:{_VALUE}|(?P<equals>=)(?=['\[{{A-Z]))?"
    )
