"""Test the grammars of the engine core: they load parallel to steps, and are kept for later
requests.
"""

import copy
import sys
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from tests.engine.tokenizers_for_tests import byte_level
from tests.reach import loaded_grammars_of, replace_vocabulary
from tests.structured_output.helpers import BYTES, compiled, make_request, spec
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    StructuredOutputConfig,
    VllmConfig,
)
from vllm.guided_decoding_params import GrammarStart
from vllm.structured_output import matchers
from vllm.structured_output.backends import BACKENDS, make_backend
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.structured_output.compile_worker import compile_spec
from vllm.structured_output.matchers import GrammarMatchers
from vllm.utils.background_work import TIME_SLICE_S


class Libraries:
    """Imports of libraries that wait until a test lets them continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_load = threading.Event()
        self.num_made = 0
        self.turns: set[float] = set()
        """Length of a turn of the interpreter while they are imported."""
        monkeypatch.setattr(matchers, "make_backend", self._make)
        replace_vocabulary(monkeypatch, BYTES)

    def _make(self, name, vocabulary):
        self.turns.add(sys.getswitchinterval())
        assert self.may_load.wait(120)
        self.num_made += 1
        return make_backend(name, vocabulary)


def make_matchers(
    *, model: ModelConfig | None = None, runs_with_server: bool = False, **settings
) -> GrammarMatchers:
    config = VllmConfig(
        device=DeviceConfig(runs_with_server=runs_with_server),
        model=model or ModelConfig(),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64),
        structured_output=StructuredOutputConfig(**settings),
    )
    return GrammarMatchers(config)


def first_mask(grammars: GrammarMatchers, request) -> np.ndarray:
    matcher = grammars.matcher(request, [])
    mask = np.zeros(BYTES.num_words, np.int32)
    matcher.fill(mask)
    assert matcher.error is None
    return mask


def test_a_grammar_is_loaded_in_the_background_and_once(monkeypatch):
    libraries = Libraries(monkeypatch)
    grammars = make_matchers()
    request = make_request(compiled("regex", "[ab]"))
    future = grammars.prepare(request)
    assert future is not None and not future.done(), "it returned while the library is imported"
    assert grammars.prepare(request) is future
    other = grammars.prepare(make_request(compiled("regex", "[cd]")))
    libraries.may_load.set()
    future.result(120)
    other.result(120)
    assert grammars.prepare(request) is None
    assert libraries.num_made == 1
    assert first_mask(grammars, request).any()


@pytest.mark.parametrize("are_weights_loaded", [False, True])
def test_libraries_are_loaded_beside_the_weights_and_in_time_slices(
    monkeypatch, are_weights_loaded
):
    usual = sys.getswitchinterval()
    libraries = Libraries(monkeypatch)
    grammars = make_matchers(runs_with_server=True)
    if are_weights_loaded:
        grammars.end_preload()
    grammars.preload_while_loading()
    future = grammars.prepare(make_request(compiled("regex", "[ab]")))
    libraries.may_load.set()
    future.result(120)
    assert libraries.turns == {TIME_SLICE_S}
    for thread in threading.enumerate():
        if thread.name.startswith("grammar"):
            thread.join(120)
    assert libraries.num_made == (1 if are_weights_loaded else len(BACKENDS))
    assert sys.getswitchinterval() == usual


def test_a_grammar_that_is_loaded_does_not_wait_for_one_that_is_being_loaded(monkeypatch):
    libraries = Libraries(monkeypatch)
    grammars = make_matchers()
    libraries.may_load.set()
    ready = make_request(compiled("regex", "[ab]"))
    grammars.prepare(ready).result(120)
    libraries.may_load.clear()
    slow = grammars.prepare(make_request(compiled("json", {"type": "boolean"})))
    assert first_mask(grammars, ready).any()
    assert not slow.done()
    libraries.may_load.set()
    slow.result(120)


def test_a_grammar_that_cannot_be_loaded_fails_its_request_in_its_first_step(monkeypatch):
    Libraries(monkeypatch).may_load.set()
    grammars = make_matchers()
    grammar = compiled("regex", "[ab]")
    request = make_request(msgspec.structs.replace(grammar, content=b"rubbish", key=b"other"))
    grammars.prepare(request).result(120)
    matcher = grammars.matcher(request, [])
    matcher.fill(np.zeros(BYTES.num_words, np.int32))
    assert matcher.error is not None and "structured output failed" in matcher.error


@pytest.mark.parametrize("differs", [False, True])
def test_the_tokenizer_is_made_only_where_its_file_does_not_say_all(monkeypatch, tmp_path, differs):
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.save_pretrained(tmp_path)
    if differs:  # simulate a tokenizer class of transformers that adds tokens
        tokenizer.add_tokens(["<think>"])
    made = []
    monkeypatch.setattr(matchers, "load_tokenizer", lambda model: made.append(1) or tokenizer)
    grammars = make_matchers(
        model=ModelConfig(tokenizer=str(tmp_path), arch=SimpleNamespace(vocab_size=4200))
    )
    vocabulary = Vocabulary.of(tokenizer, 4200)
    library = make_backend("llguidance", vocabulary)
    for pattern in ("[ab]", "[cd]"):
        grammar = compile_spec(spec("regex", pattern), vocabulary, {"llguidance": library})
        request = make_request(grammar)
        grammars.prepare(request).result(120)
        matcher = grammars.matcher(request, [])
        matcher.fill(np.zeros(vocabulary.num_words, np.int32))
        assert matcher.error is None
    assert len(made) == differs


def test_a_request_without_a_grammar_has_nothing_to_load():
    assert make_matchers().prepare(make_request(None)) is None


def test_grammars_are_kept_up_to_a_size_and_loaded_again_when_they_are_needed(monkeypatch):
    Libraries(monkeypatch).may_load.set()
    grammars = make_matchers(grammar_cache_bytes=2**18)
    requests = [make_request(compiled("regex", f"[ab]{{{n}}}")) for n in range(1, 4)]
    for request in requests:
        grammars.prepare(request).result(120)
    assert len(loaded_grammars_of(grammars)) == 1
    assert first_mask(grammars, requests[0]).any()


def test_a_grammar_that_begins_late_is_ready_once_its_markers_are_indexed(monkeypatch):
    Libraries(monkeypatch).may_load.set()
    made = make_matchers()
    grammar = compiled("regex", "a+")
    at_once, late = make_request(grammar), make_request(grammar)
    start = GrammarStart(is_thinking=True, thought_ends=("</only here>",))
    late.sampling_params.guided_decoding.start = start
    made.prepare(at_once).result(120)
    assert made.prepare(at_once) is None
    made.prepare(late).result(120)
    assert made.prepare(late) is None and BYTES.is_indexed(start.thought_ends)
