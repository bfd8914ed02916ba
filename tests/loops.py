"""Run many short cases as one test: each item of pytest costs milliseconds of its own."""

import functools
import inspect
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

Test = Callable[..., None]


def loop_over(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Let a test run with each of these values, one after another, as parametrize does in tests of
    their own.

    Each case begins with the global generators as a test does. Fixtures are shared by all cases.

    Args:
        names: arguments of the test, separated by commas.
        values: the value of the argument or, for several arguments, a tuple of their values.
    """
    arguments, cases = [name.strip() for name in names.split(",")], list(values)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            for case in cases:
                given = dict(zip(arguments, case if len(arguments) > 1 else (case,), strict=True))
                print(f"case: {given}")  # of a test that fails, pytest shows the last one
                random.seed(0)
                np.random.seed(0)
                torch.default_generator.manual_seed(0)
                test(**fixtures, **given)

        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in arguments]
        assert len(others) + len(arguments) == len(signature.parameters), f"no argument {names}"
        run_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_all

    return decorate
