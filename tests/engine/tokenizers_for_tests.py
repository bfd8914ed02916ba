"""Small tokenizers, one of every kind that decodes differently."""

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

import vllm

BUNDLED_MODEL = Path(vllm.__file__).parent / "assets" / "models" / "stdlib-llama-5m"
_CORPUS = ["the cat sat on the mat, and the hat was red", "import os, import sys, def main():"] * 20
_SPECIAL = ["<unk>", "<s>", "</s>"]
_SPACE = "\u2581"


@functools.cache
def byte_level() -> Any:
    """Return a byte-level BPE: the tokenizer of the bundled model."""
    return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))


@functools.cache
def sentencepiece() -> Any:
    """Return a tokenizer of pieces with byte fallback, as in Llama 2, which omits the first space
    of a text.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", _SPACE)
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator(_CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    names = _SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    names += sorted(model["vocab"], key=model["vocab"].__getitem__)
    backend = Tokenizer(
        models.BPE(
            {name: index for index, name in enumerate(names)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrap(backend)


@functools.cache
def metaspace() -> Any:
    """Return a tokenizer of pieces without byte fallback, which only the general decoder
    supports.
    """
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=_SPECIAL, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return _wrap(backend)


@functools.cache
def python_bytes() -> Any:
    """Return a tokenizer written in Python: token i is byte i; 256 and 257 are special."""
    return PythonByteTokenizer(bos_token="<s>", eos_token="</s>")


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


class PythonByteTokenizer(PreTrainedTokenizer):
    """A tokenizer as remote code defines it: in Python only, with one token per byte."""

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {**{f"[{byte}]": byte for byte in range(256)}, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [f"[{byte}]" for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token[1:-1])

    def _convert_id_to_token(self, index: int) -> str:
        return f"[{index}]"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        whole = b"".join(
            token.encode() if token.startswith("<") else bytes([int(token[1:-1])])
            for token in tokens
        )
        return whole.decode(errors="replace")
