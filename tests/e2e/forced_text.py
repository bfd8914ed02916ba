"""Make the model of a live server generate the text that a request asks for.

`FLAGS` switch this on for a server. A request of any API then has one more field, which the API
ignores:

    {"forced": {"text": "<think>Hm.</think>Hello.", "cut": "characters"}}

The text is split into tokens in the way that `cut` names. A logits processor allows only these
tokens, one per step, and then the end token. So the text passes through engine, detokenizer,
parsers and protocol like any text that the model generates.
"""

import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.engine.async_llm_engine import AsyncLLM
from vllm.sampling_params import LogitsProcessorConstructor, SamplingParams

FLAGS = (
    *("--middleware", f"{__name__}.ForcedText"),
    *("--logits-processor-pattern", re.escape(f"{__name__}.ForcedTokens")),
)

CUTS = ("tokenizer", "characters", "markers")
"""As the tokenizer does it; each character for itself; and with a cut in the middle of each marker,
whose ends share tokens with their neighbours."""

_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def token_ids(tokenizer: Any, text: str, cut: str) -> list[int]:
    """Return the tokens of a text that is split in one of the ways of `CUTS`."""
    if cut == "tokenizer":
        pieces = [text]
    elif cut == "characters":
        pieces = list(text)
    elif cut == "markers":
        places = [0, *((m.start() + m.end()) // 2 for m in _MARKER.finditer(text)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(places)]
    else:
        raise ValueError(f"cut must be one of {', '.join(CUTS)}, got {cut!r}")
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]


class ForcedTokens:
    """A logits processor that allows only the given tokens, one after the other.

    Args:
        tokens: the output, with its end token.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        wanted = self._tokens[min(len(output_ids), len(self._tokens) - 1)]
        forced = torch.full_like(logits, float("-inf"))
        forced[wanted] = 0.0
        return forced


_forced: ContextVar[dict[str, Any] | None] = ContextVar("forced", default=None)
_generate = AsyncLLM.generate


async def _generate_forced(
    self: AsyncLLM, prompt: Any, sampling_params: SamplingParams, *args: Any, **options: Any
) -> AsyncGenerator[Any, None]:
    """Call `AsyncLLM.generate`, with the processor if the request asks for a text."""
    if (wanted := _forced.get()) is not None:
        tokenizer = await self.get_tokenizer()
        tokens = token_ids(tokenizer, wanted["text"], wanted.get("cut", "tokenizer"))
        tokens = [*tokens, tokenizer.eos_token_id]
        name = f"{ForcedTokens.__module__}.{ForcedTokens.__qualname__}"
        sampling_params.logits_processors = [
            LogitsProcessorConstructor(qualname=name, args=[tokens])
        ]
    async for output in _generate(self, prompt, sampling_params, *args, **options):
        yield output


class ForcedText:
    """Middleware that reads the field `forced` of a request's body."""

    def __init__(self, app: ASGIApp) -> None:
        AsyncLLM.generate = _generate_forced  # type: ignore[method-assign]
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        received = [await receive()]
        while received[-1].get("more_body", False):
            received.append(await receive())
        _forced.set(_field(b"".join(message.get("body", b"") for message in received)))
        received.reverse()

        async def receive_again() -> Message:
            return received.pop() if received else await receive()

        await self._app(scope, receive_again, send)


def _field(body: bytes) -> dict[str, Any] | None:
    """Return the field `forced` of a body. None: the body has no such field, or is not JSON."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value.get("forced") if isinstance(value, dict) else None
