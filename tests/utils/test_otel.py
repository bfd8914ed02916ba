"""Test spans as a collector receives them."""

import sys

import pytest

from vllm.errors import ConfigError
from vllm.utils.otel import Tracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    tracer = Tracer("http://unused", processor=SimpleSpanProcessor(exporter))
    yield tracer
    tracer.shutdown()


def test_a_span_has_what_is_known_at_its_begin_and_end(tracer, exporter):
    tracer.begin("POST /x", {}, {"a": 1}).end({"b": 2.5})
    (span,) = exporter.get_finished_spans()
    assert (span.name, dict(span.attributes)) == ("POST /x", {"a": 1, "b": 2.5})
    assert span.parent is None and span.status.is_unset
    assert span.resource.attributes["service.name"] == "vllm"


def test_a_span_is_part_of_the_trace_of_its_caller(tracer, exporter):
    tracer.begin("x", {"traceparent": PARENT, "other": "1"}, {}).end({}, error="status 500")
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.status.description == "status 500"


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-0", "\xff", PARENT[:-1]])
def test_a_traceparent_that_is_none_begins_a_trace(tracer, exporter, parent):
    tracer.begin("x", {"traceparent": parent}, {}).end({})
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_without_the_packages_there_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"vllm\[otel\]"):
        Tracer("http://unused")
