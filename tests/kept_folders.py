"""Folders of small models that a run of the tests makes once, whichever process needs one first."""

import contextlib
import functools
import hashlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

VARIABLE = "FOLDER_OF_TEST_MODELS"
"""Names the folder of a run, which `tests/conftest.py` makes and removes."""

P = ParamSpec("P")


def kept(make: Callable[P, Path]) -> Callable[P, Path]:
    """Let a function that writes a model copy what an earlier call with the same arguments wrote.

    A call does not change the state of torch's generator, so a test draws the same values whether
    it made the model or not.

    Args:
        make: writes into its argument `folder`, and returns this folder.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def copy(*args: P.args, **kwargs: P.kwargs) -> Path:
        import torch  # not where this module is imported: the process that distributes tests

        root = os.environ.get(VARIABLE)
        if root is None:  # outside of pytest
            return make(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        folder = Path(given.arguments.pop("folder"))
        key = repr((make.__module__, make.__qualname__, sorted(given.arguments.items())))
        source = Path(root, hashlib.sha256(key.encode()).hexdigest())
        if not source.is_dir():
            before = torch.default_generator.get_state()
            with tempfile.TemporaryDirectory(dir=root) as part:
                given.arguments["folder"] = Path(part, "model")
                make(*given.args, **given.kwargs)
                with contextlib.suppress(OSError):  # another process was faster
                    Path(part, "model").rename(source)
            torch.default_generator.set_state(before)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return folder

    return copy
