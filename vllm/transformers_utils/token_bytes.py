"""Find the UTF-8 bytes of each token.

Nearly every tokenizer of a language model decodes by joining the bytes of its tokens: byte-level
BPE (GPT-2, Llama 3, Qwen) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma). For
these, text is created token by token with a dictionary look-up, and no prefix is decoded twice.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer, decoders, models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE_MARK = "\u2581"
"""Character that SentencePiece writes for a space inside a token."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_ONE_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class TokenBytes(dict[int, bytes]):
    """Maps token ids to bytes, computed at the first use; empty for an id without a token.

    Args:
        backend: tokenizer of the tokenizers library.
        is_byte_level: tokens are written in the alphabet of byte-level BPE.
        hidden: ids of tokens to treat as having no bytes, such as special tokens.

    Attributes:
        texts: token id -> its text; None if its bytes are not complete characters.
    """

    def __init__(
        self, backend: Tokenizer, *, is_byte_level: bool, hidden: Iterable[int] = ()
    ) -> None:
        super().__init__()
        self.texts = _WholeTexts(self)
        self._backend = backend
        self._to_bytes = _byte_level_bytes if is_byte_level else _sentencepiece_bytes
        self.update(dict.fromkeys(hidden, b""))

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        value = b"" if token is None else self._to_bytes(token)
        self[token_id] = value
        return value


class _WholeTexts(dict[int, str | None]):
    """Maps token ids to text, computed at the first use; None if the bytes are not complete
    characters.
    """

    def __init__(self, table: TokenBytes) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self._table[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


USUAL_TOKEN_BYTES = 8
"""Usual upper limit of bytes per token in a text."""
_NFC_SHRINK = 3
"""NFC makes a text at most three times shorter: three jamo of nine bytes are one syllable of three
(https://unicode.org/faq/normalization.html)."""
_LOSSLESS_SPLITS = {"ByteLevel", "Metaspace", "Digits"}
"""Pre-tokenizers that keep every byte of the text."""


class TextLengthBound:
    """Computes a lower bound for the number of tokens of a text from its number of bytes.

    A token has a bounded number of bytes, if the tokenizer keeps every byte of a text. For
    tokenizers that drop white space, or map a whole word to one unknown token, the bound is 0.

    Args:
        tokenizer: tokenizer whose vocabulary is read, which takes about 0.1 s.

    Attributes:
        tokenizer: as given.
        max_bytes: largest number of text bytes for which one token stands; None: there is no bound.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self.max_bytes: int | None = None
        self._shrink: int | None = 1
        self._strips: tuple[str, ...] = ()
        backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if backend is None or not _keeps_every_byte(backend):
            return
        self._shrink = _shrink_of(_spec(backend.normalizer))
        if self._shrink is None:
            return
        added = backend.get_added_tokens_decoder().values()
        # These tokens remove all white space next to them.
        self._strips = tuple(t.content for t in added if t.lstrip or t.rstrip)
        # SentencePiece's space marker counts with all of its bytes, because a text may contain the
        # marker itself.
        to_bytes = (
            _byte_level_bytes if isinstance(backend.decoder, decoders.ByteLevel) else str.encode
        )
        self.max_bytes = max(len(to_bytes(token)) for token in backend.get_vocab(True))

    def min_tokens(self, text: str, num_bytes: int) -> int:
        """Return a lower bound for the number of tokens of a text, without the tokens of the
        template around it.

        Args:
            text: valid Unicode.
            num_bytes: number of its UTF-8 bytes.
        """
        if self.max_bytes is None or any(content in text for content in self._strips):
            return 0
        shrink = 1 if text.isascii() else self._shrink or 1
        return num_bytes // (self.max_bytes * shrink)


def _spec(part: Any) -> dict[str, Any]:
    """Return a part of a tokenizer as a JSON object; {} if it is missing."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _keeps_every_byte(backend: Tokenizer) -> bool:
    """Return whether each byte of a normalised text is part of a token."""
    decoding = ByteDecoding.of(backend)
    if decoding is None or not isinstance(backend.model, models.BPE):
        return False
    vocabulary = backend.get_vocab(False)
    if decoding.is_byte_level:
        has_bytes = all(character in vocabulary for character in _ALPHABET)
    else:
        has_bytes = bool(backend.model.byte_fallback) and all(
            f"<0x{byte:02X}>" in vocabulary for byte in range(256)
        )
    return has_bytes and _splits_without_loss(_spec(backend.pre_tokenizer))


def _splits_without_loss(spec: dict[str, Any]) -> bool:
    if spec.get("type") == "Sequence":
        return all(map(_splits_without_loss, spec["pretokenizers"]))
    if spec.get("type") == "Split":
        return bool(spec["behavior"] != "Removed")
    return not spec or spec["type"] in _LOSSLESS_SPLITS


def _shrink_of(spec: dict[str, Any]) -> int | None:
    """Return the largest factor by which a normalizer shortens texts that are not ASCII; None:
    unknown."""
    if spec.get("type") == "Sequence":
        shrink = 1
        for step in spec["normalizers"]:
            factor = _shrink_of(step)
            if factor is None:
                return None
            shrink *= factor
        return shrink
    if spec.get("type") == "Replace":  # a rule that replaces spaces by SentencePiece's marker
        is_mark = spec["pattern"] == {"String": " "} and spec["content"] == _SPACE_MARK
        return 1 if is_mark else None
    if spec.get("type") == "NFC":
        return _NFC_SHRINK
    return 1 if not spec or spec["type"] in ("Prepend", "ByteLevel") else None


@dataclass(frozen=True)
class ByteDecoding:
    """Rules for tokenizers that decode by joining the bytes of tokens."""

    is_byte_level: bool
    """Tokens are in the alphabet of byte-level BPE; else SentencePiece with byte fallback."""
    strips_first_space: bool
    """A space at the very beginning of a text is left out."""

    @classmethod
    def of(cls, backend: Tokenizer) -> "ByteDecoding | None":
        """Return the decoding rules of a tokenizer; None if it decodes in another way."""
        if not isinstance(backend.decoder, (decoders.ByteLevel, decoders.Sequence)):
            return None
        return cls.of_spec(json.loads(backend.decoder.__getstate__()))

    @classmethod
    def of_spec(cls, spec: dict[str, Any]) -> "ByteDecoding | None":
        """Return the decoding rules for the `decoder` of tokenizer.json; None if it decodes in
        another way.
        """
        steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(is_byte_level=True, strips_first_space=False)
        if steps in (_SENTENCEPIECE, [*_SENTENCEPIECE, _STRIP_ONE_SPACE]):
            return cls(is_byte_level=False, strips_first_space=steps != _SENTENCEPIECE)
        return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character: printable Latin-1 characters mean themselves, the
    other bytes are written as characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return alphabet


_ALPHABET = _byte_level_alphabet()
_CHARACTERS = {byte: character for character, byte in _ALPHABET.items()}


def byte_level_text(token: bytes) -> str:
    """Write the bytes of a token as byte-level BPE does: one character for each byte."""
    return "".join(map(_CHARACTERS.__getitem__, token))


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    normalized: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken]
    decoder: dict[str, Any]
    normalizer: dict[str, Any] | None = None


def read_token_bytes(path: Path, num_tokens: int) -> list[bytes] | None:
    """Read the bytes of each token from tokenizer.json, without creating a tokenizer.

    This takes a tenth of the time of creating the tokenizer, and blocks other threads only for a
    moment: the tokenizers library lets no other thread run until it has built its tables. Changes
    by a tokenizer class of transformers are not included.

    Args:
        path: tokenizer.json.
        num_tokens: length of the result. Special tokens, and ids without a token, have no bytes.

    Returns:
        The bytes of each token. None: the file does not exist or has another form, or its tokens do
            not decode by joining bytes.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError):
        return None
    decoding = ByteDecoding.of_spec(found.decoder)
    if decoding is None:
        return None
    vocab = found.model.vocab
    pairs = vocab.items() if isinstance(vocab, dict) else ((p[0], i) for i, p in enumerate(vocab))
    to_bytes = _byte_level_bytes if decoding.is_byte_level else _sentencepiece_bytes
    result = [b""] * num_tokens
    for token, token_id in pairs:
        if token_id < num_tokens:
            result[token_id] = to_bytes(token)
    for added in found.added_tokens:
        if added.normalized and not added.special and found.normalizer:
            return None  # the library normalizes the text of this token, which changes its bytes
        if added.id < num_tokens:
            result[added.id] = b"" if added.special else to_bytes(added.content)
    return result


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, which is stored as plain text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if byte := _BYTE_TOKEN.match(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()
