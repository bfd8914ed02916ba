"""Test that a process with many connections may open as many files as the system lets it."""

import resource

import pytest

from vllm.entrypoints.shared.open_files import allow_many_connections

FILES = resource.RLIMIT_NOFILE
ENDLESS = resource.RLIM_INFINITY
MOST = 2**20


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, ENDLESS), (MOST, ENDLESS)),
        ((1024, 2**30), (MOST, 2**30)),
        ((4096, 4096), None),
        ((2**21, ENDLESS), None),
        ((ENDLESS, ENDLESS), None),
    ],
)
def test_the_soft_limit_is_raised(before, after, monkeypatch):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append((kind, limits)))
    allow_many_connections()
    assert found == ([] if after is None else [(FILES, after)])


def test_a_limit_that_the_system_refuses_stays(monkeypatch):
    def refuse(kind, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    allow_many_connections()
