"""Format log-probabilities for chats, completions and prompts."""

import codecs
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.outputs import Logprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_LOGPROB = -9999.0
"""Replaces -inf, which JSON does not have."""

MANY_POSITIONS = 512
"""With this many positions or more, they are formatted in a thread: each takes up to 0.1 ms."""

Position = Mapping[int, Logprob]
"""Token id -> Logprob; the sampled, or actual, token first."""


def token_text(token_id: int, logprob: Logprob, *, as_token_id: bool) -> str:
    """Return the text of a token; or `token_id:7`, which identifies the token, if requested or if
    its text is not known.
    """
    if as_token_id or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token


BytesOf = Callable[[int], bytes]
"""Token id -> its bytes, which need not be whole characters."""


@functools.lru_cache(maxsize=2)
@functools.lru_cache(maxsize=2)
def bytes_of_tokens(tokenizer: "PreTrainedTokenizerBase") -> BytesOf | None:
    """Return a function that returns the exact bytes of tokens; None if the tokenizer does not work
    on bytes.
    """
    from vllm.transformers_utils.token_bytes import ByteDecoding, TokenBytes

    # Only fast tokenizers have this attribute.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (decoding := ByteDecoding.of(backend)) is None:
        return None
    known = TokenBytes(backend, is_byte_level=decoding.is_byte_level)
    return known.__getitem__


def chat_logprobs(
    positions: Sequence[Position],
    num_top: int,
    *,
    as_token_ids: bool,
    bytes_of: BytesOf | None = None,
) -> dict[str, Any]:
    """Return `ChatCompletionLogProbs` as a plain dict.

    Args:
        positions: log-probabilities of the output positions.
        num_top: number of most likely tokens to show per position; 0: an empty list.
        as_token_ids: write tokens as `token_id:7`.
        bytes_of: returns the bytes of a token; None: use the bytes of its text, in which an
            incomplete character is U+FFFD.
    """
    content = []
    for position in positions:
        entries = [_chat_entry(i, entry, as_token_ids, bytes_of) for i, entry in position.items()]
        ranked = sorted(zip(position.values(), entries, strict=True), key=lambda pair: _rank(*pair))
        top = [entry for _, entry in ranked[:num_top]]
        content.append({**entries[0], "top_logprobs": top})
    return {"content": content, "refusal": None}


def _rank(logprob: Logprob, _: Any) -> int:
    return logprob.rank or 0


def _chat_entry(
    token_id: int, logprob: Logprob, as_token_ids: bool, bytes_of: BytesOf | None
) -> dict[str, Any]:
    text = token_text(token_id, logprob, as_token_id=as_token_ids)
    raw = text.encode("utf-8", "replace") if bytes_of is None else bytes_of(token_id)
    value = max(logprob.logprob, MIN_LOGPROB)
    return {"token": text, "logprob": value, "bytes": list(raw)}


class CompletionLogprobs:
    """Creates the `CompletionLogProbs` of one text piece by piece, with continuous offsets.

    The texts of the tokens are parts of the whole text. A character of several tokens is the text
    of its last token, and the other tokens have no text.

    Args:
        as_token_ids: write tokens as `token_id:7`.
        text_of: returns the text of a token without a log-probability, which is the first of a
            prompt.
        bytes_of: returns the bytes of a token; None: the tokenizer does not work on bytes, so each
            token uses its own text.
        prompt: text of the prompt tokens, which may lack a first space.
        hidden: tokens without text, which the tokenizer adds around a prompt.
        skipped: tokens of the output without text.
    """

    def __init__(
        self,
        *,
        as_token_ids: bool,
        text_of: Callable[[int], str],
        bytes_of: BytesOf | None = None,
        prompt: str = "",
        hidden: Collection[int] = (),
        skipped: Collection[int] = (),
    ) -> None:
        self._as_token_ids = as_token_ids
        self._hidden = hidden
        self._skipped = skipped
        self._text_of = text_of
        self._bytes_of = bytes_of
        self._prompt = prompt
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def make(
        self,
        token_ids: Sequence[int],
        positions: Sequence[Position | None],
        num_prompt_tokens: int = 0,
    ) -> dict[str, list[Any]]:
        """Return the log-probabilities of the next piece.

        Args:
            token_ids: tokens of the piece.
            positions: log-probabilities of each token; None: the token has none.
            num_prompt_tokens: number of first tokens of the piece that belong to the prompt.
        """
        made: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for i, (token_id, position) in enumerate(zip(token_ids, positions, strict=False)):
            entry = None if position is None else position.get(token_id)
            text = None if entry is None else entry.decoded_token
            if text is None:
                text = self._text_of(token_id)
            is_hidden = token_id in (self._hidden if i < num_prompt_tokens else self._skipped)
            if self._bytes_of is not None and not is_hidden:
                text = self._decode(self._bytes_of(token_id))
            if i < num_prompt_tokens and text[:1] == " ":
                text = text if self._prompt.startswith(text, self._offset) else text[1:]
            made["text_offset"].append(self._offset)
            made["tokens"].append(f"token_id:{token_id}" if self._as_token_ids else text)
            made["token_logprobs"].append(
                None if entry is None else max(entry.logprob, MIN_LOGPROB)
            )
            made["top_logprobs"].append(None if position is None else self._top(position))
            if not is_hidden:
                self._offset += len(text)
        return made

    def _top(self, position: Position) -> dict[str, float]:
        return {
            token_text(i, entry, as_token_id=self._as_token_ids): max(entry.logprob, MIN_LOGPROB)
            for i, entry in position.items()
        }


def prompt_logprobs(
    positions: Sequence[Position | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return the `prompt_logprobs` of a response: per position, token id -> logprob, rank, decoded
    token.
    """
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": max(entry.logprob, MIN_LOGPROB),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in positions
    ]
