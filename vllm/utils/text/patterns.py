"""Compile regular expressions from users and checkpoints."""

import re


def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
        ValueError: it is not a regular expression that Python can compile; the message says why.
    """
    try:
        return re.compile(text)
    except RecursionError:
        raise ValueError("its groups are nested too deeply") from None
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
