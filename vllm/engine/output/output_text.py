"""Create the text of one sample: detokenise it and cut it at a stop string. Text that may still be
cut is held back.
"""

from collections.abc import Sequence

from vllm.engine.output.detokenizer import Detokenizer
from vllm.engine.output.stop_strings import StopStrings


class OutputText:
    """The output text of one sample, which grows token by token.

    Args:
        detokenizer: used by this sample only.
        stop: stop strings, or None.
        min_tokens: output tokens before which no stop string ends the output.

    Attributes:
        text: the text so far; complete once finished.
        num_shown: characters of it that will not change and may be shown.
        num_tokens: tokens processed, if there are stop strings.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_stop", "num_shown", "num_tokens", "text")

    def __init__(
        self, detokenizer: Detokenizer, stop: StopStrings | None, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.text = ""
        self.num_shown = 0

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Add new output tokens.

        Returns:
            The stop string that ends the output, or None. After a stop string the text is cut and
            complete, and further tokens are ignored.
        """
        if self._stop is None:
            self.text += self._detokenizer.push(token_ids)
            self.num_shown = len(self.text)
            return None
        for token_id in token_ids:
            if (matched := self._append_one(token_id, self._stop)) is not None:
                return matched
        return None

    def finish(self) -> None:
        """Complete the text: no more tokens follow, so text that was held back is released."""
        self.text += self._detokenizer.flush()
        self.num_shown = len(self.text)

    def _append_one(self, token_id: int, stop: StopStrings) -> str | None:
        new = self._detokenizer.push((token_id,))
        self.num_tokens += 1
        if not new:
            return None
        self.text += new
        if self.num_tokens >= self._min_tokens:
            match = stop.find(self.text, len(new))
            if match is not None:
                self.text = self.text[: match.end if stop.is_shown else match.start]
                self.num_shown = len(self.text)
                return match.string
        self.num_shown = max(self.num_shown, len(self.text) - stop.num_held(self.text))
        return None
