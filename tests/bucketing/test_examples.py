import doctest
import importlib
import pkgutil

import vllm.bucketing


def test_examples_in_docstrings_are_right():
    names = [module.name for module in pkgutil.iter_modules(vllm.bucketing.__path__)]
    results = [doctest.testmod(importlib.import_module(f"vllm.bucketing.{name}")) for name in names]
    assert sum(result.attempted for result in results) >= 6
    assert not any(result.failed for result in results)
