"""The UTF-8 bytes that each token stands for.

Nearly every tokenizer of a language model decodes by joining the bytes of its tokens: byte-level
BPE (GPT-2, Llama 3, Qwen) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma). For
those, text can be made token by token at the price of a dictionary look-up, and no prefix has to
be decoded twice.
"""

import json
import re
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders

_SPACE_MARK = "\u2581"
"""How SentencePiece writes a space inside a token."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_ONE_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled as tokens are met; empty for an id without a token.

    Args:
        backend: the tokenizer of the tokenizers library.
        is_byte_level: tokens are written in the alphabet of byte-level BPE.
        skip_special_tokens: special tokens have no bytes.

    Attributes:
        texts: token id -> its text; None where its bytes are no whole characters.
    """

    def __init__(
        self, backend: Tokenizer, *, is_byte_level: bool, skip_special_tokens: bool
    ) -> None:
        super().__init__()
        self.texts = _WholeTexts(self)
        self._backend = backend
        self._to_bytes = _byte_level_bytes if is_byte_level else _sentencepiece_bytes
        if skip_special_tokens:
            added = backend.get_added_tokens_decoder()
            self.update((token_id, b"") for token_id, token in added.items() if token.special)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        value = b"" if token is None else self._to_bytes(token)
        self[token_id] = value
        return value


class _WholeTexts(dict[int, str | None]):
    """Filled as tokens are met."""

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


@dataclass(frozen=True)
class ByteDecoding:
    """How a tokenizer decodes that joins bytes."""

    is_byte_level: bool
    """Tokens are in the alphabet of byte-level BPE; else SentencePiece with byte fallback."""
    strips_first_space: bool
    """A space at the very beginning of a text is left out."""

    @classmethod
    def of(cls, backend: Tokenizer) -> "ByteDecoding | None":
        """None when the tokenizer decodes in another way."""
        if not isinstance(backend.decoder, (decoders.ByteLevel, decoders.Sequence)):
            return None
        spec = json.loads(backend.decoder.__getstate__())
        steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(is_byte_level=True, strips_first_space=False)
        if steps in (_SENTENCEPIECE, [*_SENTENCEPIECE, _STRIP_ONE_SPACE]):
            return cls(is_byte_level=False, strips_first_space=steps != _SENTENCEPIECE)
        return None


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the rest for 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, written as it reads
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if byte := _BYTE_TOKEN.match(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()
