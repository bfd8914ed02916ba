"""Test calls to workers by name, and the class of the worker with a user's extension."""

import pytest

from vllm.config import ParallelConfig
from vllm.errors import ConfigError, RequestError
from vllm.executor.ranks.worker_call import call_worker, resolve_worker_class

HERE = "tests.executor.test_worker_call"


class Worker:
    """A class with methods like the worker of a device."""

    rank = 3

    def __init__(self) -> None:
        self.runner = "runner"

    def scale(self, x: int, by: int = 2) -> int:
        return x * by

    def _secret(self) -> str:
        return "sesame"


class Extension:
    def whose(self) -> str:
        return f"{self.runner} of {self.rank}"


class Clash:
    def scale(self) -> None:
        """Do nothing; the worker already has a method of this name."""


def resolve(**settings) -> type:
    return resolve_worker_class(ParallelConfig(**settings), f"{HERE}:Worker")


def test_a_worker_is_called_by_name_or_with_a_function():
    worker = Worker()
    assert call_worker(worker, "scale", (4,), {"by": 5}) == 20
    assert call_worker(worker, lambda w, x: w.scale(x), (4,), {}) == 8


@pytest.mark.parametrize("name", ["nothing", "_secret", "__init__", "rank", ""])
def test_only_public_methods_have_a_name(name):
    with pytest.raises(RequestError, match=f"no method {name!r}.*--worker-extension-cls"):
        call_worker(Worker(), name, (), {})


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"to": 2})])
def test_wrong_arguments_are_the_callers_fault(args, kwargs):
    with pytest.raises(RequestError, match=r"method 'scale'.*argument"):
        call_worker(Worker(), "scale", args, kwargs)


def test_an_extension_adds_methods_to_whatever_worker_there_is():
    assert resolve() is Worker
    extended = resolve(worker_extension_cls=f"{HERE}.Extension")
    assert extended.__name__ == "Worker" and issubclass(extended, Worker)
    assert extended().whose() == "runner of 3"
    assert resolve(worker_cls=f"{HERE}:Extension") is Extension


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker_cls": "nowhere.Worker"}, "worker_cls='nowhere.Worker' cannot be imported"),
        ({"worker_cls": "Worker"}, "worker_cls='Worker' cannot be imported"),
        ({"worker_cls": f"{HERE}.HERE"}, "must name a class, but it is a str"),
        ({"worker_extension_cls": f"{HERE}.Missing"}, "worker_extension_cls=.*Missing' cannot"),
        ({"worker_extension_cls": f"{HERE}.Clash"}, "defines scale, which the worker has already"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**settings)
