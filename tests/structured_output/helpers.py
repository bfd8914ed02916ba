"""A vocabulary of bytes, grammars that are compiled in this process, and random outputs of them."""

import json
import random
from functools import cache
from typing import Any

import numpy as np

from vllm.messages import EngineRequest, Grammar
from vllm.sampling_params import GuidedDecodingParams, SamplingParams
from vllm.structured_output.backends import BACKENDS, make_backend
from vllm.structured_output.backends.interface import Backend, BackendMatcher, LoadedGrammar
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.structured_output.compile_worker import compile_spec
from vllm.structured_output.row_matcher import RowMatcher
from vllm.structured_output.spec import GrammarSpec

END = 256
NUM_PADDING = 7
BYTES = Vocabulary([bytes([i]) for i in range(256)] + [b""] * (1 + NUM_PADDING))
"""Token i is byte i; then the end token, and padding."""

_LIKELY = [ord(c) for c in ' ab019-.eE:,{}[]"tfn+ZT@/_x']
_CLOSING = [ord(c) for c in '"}]']


@cache
def backends() -> dict[str, Backend]:
    return {name: make_backend(name, BYTES) for name in BACKENDS}


def spec(kind: str, source: Any, **options: Any) -> GrammarSpec:
    """Make a `GrammarSpec` like `make_spec`."""
    settings: dict[str, Any] = {
        "backend": "auto",
        "may_fall_back": True,
        "any_whitespace": False,
        "whitespace_pattern": None,
        "close_all_objects": False,
    }
    text = source if isinstance(source, str) else json.dumps(source)
    return GrammarSpec(kind=kind, text=text, **{**settings, **options})


def compiled(kind: str, source: Any, **options: Any) -> Grammar:
    return compile_spec(spec(kind, source, **options), BYTES, backends())


def loaded(grammar: Grammar) -> LoadedGrammar:
    return backends()[grammar.backend].load(grammar.content)


def open_matcher(grammar: Grammar) -> BackendMatcher:
    return loaded(grammar).matcher()


def walk(matcher: BackendMatcher, rng: random.Random, max_tokens: int = 400) -> str | None:
    """Return a random output that consists mostly of characters of JSON; None if it was not
    complete in time.
    """
    mask = np.empty(BYTES.num_words, np.int32)
    output = bytearray()
    for _ in range(max_tokens):
        matcher.fill(mask)
        ids = allowed(mask & BYTES.text_mask)
        if not ids or (matcher.is_complete() and rng.random() < 0.3):
            assert matcher.is_complete(), f"a dead end after {bytes(output)!r}"
            return output.decode(errors="replace")
        closing = [i for i in ids if i in _CLOSING]
        likely = [i for i in ids if i in _LIKELY]
        if closing and rng.random() < 0.35:
            ids = closing
        elif likely and rng.random() < 0.9:
            ids = likely
        token_id = rng.choice(ids)
        matcher.accept(token_id)
        output.append(token_id)
    return None


def allowed(mask: np.ndarray) -> list[int]:
    """Return the token ids of a mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def make_request(grammar: Grammar | None, **params: Any) -> EngineRequest:
    """Return a request with an output constraint; `eos`, `stop` and `model_ends` are its end
    tokens.
    """
    eos, stop = params.pop("eos", END), params.pop("stop", ())
    model_ends = params.pop("model_ends", ())
    guided = GuidedDecodingParams(regex="compiled elsewhere")
    return EngineRequest(
        request_id="a",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(**{"max_tokens": None, "guided_decoding": guided, **params}),
        seed=0,
        eos_token_id=eos,
        stop_token_ids=frozenset((*stop, *model_ends)),
        model_end_token_ids=frozenset(model_ends),
        max_total_tokens=10_000,
        arrival_time=0.0,
        grammar=grammar,
    )


def row_matcher(kind: str, source: Any, output: bytes = b"", **params: Any) -> RowMatcher:
    grammar = compiled(kind, source)
    request = make_request(grammar, **params)
    return RowMatcher(request, list(output), lambda: (BYTES, loaded(grammar)))


def next_tokens(matcher: RowMatcher) -> list[int]:
    """Return the tokens that may come next; fail if the matcher has failed."""
    mask = np.empty(BYTES.num_words, np.int32)
    matcher.fill(mask)
    assert matcher.error is None, matcher.error
    return allowed(mask)
