"""Test pausing the garbage collector, even if other threads pause it too, and hiding torch."""

import gc
import logging
import sys
import threading

import pytest

from tests.reach import forget_to_leave_torch_out
from vllm.utils.imports import leave_torch_out, without_collections, without_torch


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_nothing_is_collected_inside_also_when_it_raises():
    with pytest.raises(ValueError, match="inside"), without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_program_that_has_disabled_collections_keeps_that():
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("first_out", [0, 1])
def test_threads_may_be_inside_at_the_same_time(first_out):
    inside = [threading.Event(), threading.Event()]
    leave = [threading.Event(), threading.Event()]

    def work(number):
        with without_collections():
            inside[number].set()
            assert leave[number].wait(120)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        assert inside[number].wait(120)
    for number in (first_out, 1 - first_out):
        assert not all(each.is_set() for each in leave)
        leave[number].set()
        threads[number].join(120)
    assert gc.isenabled()


def test_torch_is_hidden_only_from_a_process_that_leaves_it_out(monkeypatch, caplog):
    forget_to_leave_torch_out(monkeypatch)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with without_torch():
        assert "torch" not in sys.modules
    leave_torch_out()
    with without_torch():
        with pytest.raises(ImportError):
            import torch  # noqa: F401
        logger = logging.getLogger("transformers")
        monkeypatch.setattr(logger, "propagate", True)
        logger.warning("PyTorch was not found")
    assert "torch" not in sys.modules
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "torch", sys)
    with without_torch():
        assert sys.modules["torch"] is sys, "it is imported already"
