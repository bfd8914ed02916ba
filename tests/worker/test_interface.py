"""Test the table of calls to workers against the existing workers."""

import inspect
import re
from pathlib import Path

import pytest

from vllm.worker.cpu.worker import CPUWorker
from vllm.worker.hpu.worker import HPUWorker
from vllm.worker.interface import ENGINE_METHODS, USER_METHODS, Worker

WORKERS = [CPUWorker, HPUWorker]


@pytest.mark.parametrize("worker_class", WORKERS)
def test_every_public_method_of_a_worker_is_in_the_table(worker_class):
    methods = {
        name
        for name in dir(worker_class)
        if not name.startswith("_") and inspect.isroutine(getattr(worker_class, name))
    }
    assert methods == ENGINE_METHODS | USER_METHODS
    assert not ENGINE_METHODS & USER_METHODS


@pytest.mark.parametrize("worker_class", WORKERS)
def test_every_method_takes_the_arguments_of_the_table(worker_class):
    def arguments(cls, name):
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    for name in ENGINE_METHODS | USER_METHODS:
        assert arguments(worker_class, name) == arguments(Worker, name), name


def test_the_page_about_calls_names_what_may_be_called():
    page = (Path(__file__).parents[2] / "docs" / "engine_control.md").read_text()
    (sentence,) = re.findall(r"Of the worker's own methods (.*?) can be called", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == USER_METHODS
