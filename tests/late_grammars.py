"""Let Python run code of the tests first in the programs that they start."""

import os
from pathlib import Path

EARLY = "GRAMMARS_START_EARLY"
"""A program with this variable starts the processes for grammars with the engine, as users do."""

LATE_GRAMMARS = """
import importlib.abc, importlib.util, os, sys

def change(module):
    module.GrammarCompiler.start = lambda *args, **kwargs: None

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.structured_output.compiler":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_change(module):
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change
        return spec

if "GRAMMARS_START_EARLY" in os.environ:
    pass
elif known := sys.modules.get("vllm.structured_output.compiler"):
    change(known)
else:
    sys.meta_path.insert(0, Finder())
"""
"""For programs of tests: engines start the processes that compile grammars with the first grammar.
A start takes two seconds of processor time, and most tests compile none."""


def run_first(code: str, folder: Path) -> dict[str, str]:
    """Return environment variables with which Python runs this code, in a file of this folder,
    when it starts.
    """
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
