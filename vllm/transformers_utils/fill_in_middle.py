"""Write prompts for models that fill in the text between a beginning and an end.

Such models were trained with marker tokens around the two parts. The tokens in the tokenizer show
which format a model knows. Independent of the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PREFIX, _SUFFIX = "{prefix}", "{suffix}"


@dataclass(frozen=True)
class _Format:
    """A format, as a sequence of marker tokens and the two parts.

    Attributes:
        sequence: the prompt; the model continues it with the middle.
        ends: further tokens that only come after a middle.
    """

    sequence: Sequence[str]
    ends: Sequence[str] = ()

    @property
    def markers(self) -> list[str]:
        return [each for each in self.sequence if each not in (_PREFIX, _SUFFIX)]


_FORMATS = (
    _Format(  # Qwen 2.5 and 3, CodeGemma, Granite 4
        ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    _Format(  # StarCoder, Granite Code, Stable Code
        ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
        ("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<|endoftext|>"),
    ),
    _Format(  # SantaCoder
        ("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"),
        ("<fim-pad>", "<|endoftext|>"),
    ),
    _Format(  # DeepSeek Coder and V2 to V3
        ("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>")  # noqa: RUF001
    ),
    _Format(  # Seed Coder
        ("<[fim-suffix]>", _SUFFIX, "<[fim-prefix]>", _PREFIX, "<[fim-middle]>")
    ),
    _Format(("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX), ("[MIDDLE]",)),  # Codestral
)


class FillInMiddle:
    """The format of one model.

    Attributes:
        stop_token_ids: tokens that end the middle. The end token of the model ends it as well.
    """

    def __init__(self, sequence: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        self._sequence = sequence
        self.stop_token_ids = list(stop_token_ids)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase | None") -> "FillInMiddle":
        """Return the format that a tokenizer has tokens for.

        Raises:
            RequestError: it has none.
        """
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        ids = {token.content: token_id for token_id, token in added.items()}
        for each in _FORMATS:
            if ids.keys() >= set(each.markers):
                ends = [ids[text] for text in (*each.markers, *each.ends) if text in ids]
                return cls(each.sequence, ends)
        raise RequestError(
            "suffix must be left out, because this model cannot fill in text before a suffix: its "
            f"tokenizer has no tokens such as {' and '.join(_FORMATS[0].markers[:2])}",
            param="suffix",
        )

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the text of a prompt, in which the markers are written as text."""
        parts = {_PREFIX: prefix, _SUFFIX: suffix}
        return "".join(parts.get(each, each) for each in self._sequence)
