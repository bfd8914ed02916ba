"""Test logits processors that requests name."""

import importlib
import threading
import time

import pytest

from tests.engine.processors_for_tests import Only, only_five
from vllm.config import ModelConfig
from vllm.engine.input.named_processors import NamedProcessors
from vllm.engine.process.wire import AddRequests, decode_to_core, encode
from vllm.errors import ConfigError, RequestError
from vllm.messages import EngineRequest
from vllm.sampling_params import LogitsProcessorConstructor, SamplingParams
from vllm.utils.imports import IMPORT_LOCK

HERE = "tests.engine.processors_for_tests"
ALL = r"tests\.engine\.processors_for_tests\..*|no_such_module.*"


def make_request(processors) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(logits_processors=processors),
        seed=0,
        eos_token_id=None,
        max_total_tokens=8,
        arrival_time=time.time(),
    )


def resolve(*processors, pattern=ALL):
    request = NamedProcessors(pattern).resolve(make_request(list(processors)))
    return request.sampling_params.logits_processors


def test_a_name_stands_for_the_function():
    assert resolve(f"{HERE}.only_five") == [only_five]


def test_an_object_is_called_and_each_request_gets_one_of_its_own():
    described = {"qualname": f"{HERE}.Only", "args": [7], "kwargs": {"after": 2}}
    (first,), (second,) = resolve(described), resolve(described)
    assert type(first) is Only and (first.token_id, first.after) == (7, 2)
    assert second is not first


def test_callables_and_names_keep_their_order():
    def mine(output_ids, logits):
        return logits

    found = resolve(mine, f"{HERE}.only_five", mine)
    assert found == [mine, only_five, mine]


def test_a_request_without_names_is_left_as_it_is():
    for processors in (None, [], [only_five]):
        request = make_request(processors)
        assert NamedProcessors(None).resolve(request) is request


def test_the_params_of_the_caller_keep_the_names():
    request = make_request([f"{HERE}.only_five"])
    NamedProcessors(ALL).resolve(request)
    assert request.sampling_params.logits_processors == [f"{HERE}.only_five"]


def test_names_cross_the_socket_and_code_does_not():
    processors = [f"{HERE}.only_five", {"qualname": f"{HERE}.Only", "args": [1, {"a": None}]}]
    request = make_request(processors)
    (arrived,) = decode_to_core(encode(AddRequests(requests=[request]))).requests
    assert arrived == request
    assert arrived.sampling_params.logits_processors == [
        f"{HERE}.only_five",
        LogitsProcessorConstructor(qualname=f"{HERE}.Only", args=[1, {"a": None}]),
    ]


@pytest.mark.parametrize(
    ("pattern", "processor", "message"),
    [
        (None, f"{HERE}.only_five", "Start it with --logits-processor-pattern"),
        (r"tests\.engine", f"{HERE}.only_five", "the whole name must match"),
        (r".*\.Only", f"{HERE}.Only2", "the whole name must match"),
        (ALL, "no_such_module.f", "cannot be imported: ModuleNotFoundError"),
        (ALL, f"{HERE}.no_such_name", "cannot be imported: AttributeError"),
        (ALL, f"{HERE}.NUMBER", "is a int, which cannot be called"),
        (ALL, {"qualname": f"{HERE}.Only"}, "failed: TypeError"),
        (ALL, {"qualname": f"{HERE}.Only", "args": ["x"]}, "failed: TypeError"),
        (ALL, {"qualname": f"{HERE}.Only", "kwargs": {"x": 1}}, "failed: TypeError"),
        (ALL, {"qualname": f"{HERE}.make_nothing"}, "returned a NoneType"),
        (ALL, {"qualname": f"{HERE}.exit_at_once"}, "failed: SystemExit: 3"),
    ],
)
def test_what_cannot_be_used_is_refused(pattern, processor, message):
    with pytest.raises(RequestError, match=r"^logits_processors: ") as caught:
        resolve(processor, pattern=pattern)
    assert message in str(caught.value) and caught.value.param == "logits_processors"


@pytest.mark.parametrize(
    "processor",
    [
        *(5, None, "", "name", ".a", "a.", "a..b", "a b.c", "a.b()", "a." + "x" * 300, [], ["a.b"]),
        *({}, {"name": "a.b"}, {"qualname": 5}, {"qualname": "a.b", "more": 1}, {5: 6}),
        *({"qualname": "a.b", "args": {}}, {"qualname": "a.b", "kwargs": []}),
        *({"qualname": "a.b", "args": [2**64]}, {"qualname": "a.b", "args": [object()]}),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_what_is_no_processor_is_refused_by_its_field(processor):
    with pytest.raises(RequestError) as caught:
        SamplingParams(logits_processors=[processor])
    assert caught.value.param == "logits_processors" and len(str(caught.value)) < 300


def test_a_pattern_that_is_none_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"logits_processor_pattern '\(' is not a regular"):
        ModelConfig(logits_processor_pattern="(")


def test_no_other_thread_may_import_while_a_processor_is_imported(monkeypatch):
    could_import = []

    def try_to_enter():
        if IMPORT_LOCK.acquire(blocking=False):
            could_import.append(True)
            IMPORT_LOCK.release()
        else:
            could_import.append(False)

    def import_slowly(name):
        thread = threading.Thread(target=try_to_enter)
        thread.start()
        thread.join()
        return importlib.import_module(name)

    monkeypatch.setattr("vllm.utils.imports.import_module", import_slowly)
    resolve(f"{HERE}.only_five")
    try_to_enter()
    assert could_import == [False, True]
