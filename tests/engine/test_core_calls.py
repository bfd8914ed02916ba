"""Test the table of calls to an engine core against the core and the engines that offer the
calls.
"""

import inspect

import pytest

from vllm import LLM
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.engine_core import EngineCore
from vllm.engine.llm_engine import LLMEngine
from vllm.engine.process.core_calls import CORE_CALLS, CoreCalls
from vllm.utils.methods import passed_on

FOR_USERS = sorted(CORE_CALLS - {"call_workers", "replace_buckets"})


def arguments(cls, name):
    parameters = inspect.signature(getattr(cls, name)).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


@pytest.mark.parametrize("name", sorted(CORE_CALLS))
def test_the_core_takes_the_arguments_of_the_table(name):
    assert name in vars(EngineCore), "it has the method itself"
    assert arguments(EngineCore, name) == arguments(CoreCalls, name)


@pytest.mark.parametrize("name", FOR_USERS)
def test_both_engines_offer_every_call_of_the_table(name):
    accepted = arguments(CoreCalls, name)
    for engine in (LLMEngine, AsyncLLM):
        assert arguments(engine, name)[: len(accepted)] == accepted
        assert inspect.getdoc(getattr(engine, name))
    assert inspect.iscoroutinefunction(getattr(AsyncLLM, name))


@pytest.mark.parametrize("name", ["sleep", "wake_up"])
def test_a_call_is_described_once_for_all_engines(name):
    for engine in (LLM, LLMEngine, AsyncLLM):
        method = getattr(engine, name)
        assert method.__doc__ == getattr(CoreCalls, name).__doc__
        assert arguments(engine, name) == arguments(CoreCalls, name)


def test_a_call_that_is_passed_on_reaches_the_method_of_the_object_itself():
    class Inner:
        def add(self, a: int, b: int = 1) -> int:
            """Add two numbers."""
            return a + b

    class Doubling(Inner):
        def add(self, a: int, b: int = 1) -> int:
            return 2 * super().add(a, b)

    class Outer:
        inner = Doubling()
        add = passed_on(Inner.add, lambda outer: outer.inner)

    assert Outer().add(2, b=3) == 10 and Outer().add(2) == 6
    assert Outer.add.__doc__ == "Add two numbers."
