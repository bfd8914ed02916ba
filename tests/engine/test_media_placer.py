"""Test at which positions of a prompt the tokens of media are."""

from typing import Any

import numpy as np

from vllm.engine.input.media_placer import Expanded, ReadMedia, find_expanded
from vllm.multimodal.interface.family import EncoderInput, Expansion

TEXT, IMAGE = 5, 7


class CountedTokens(list[int]):
    """Tokens that count how many of them are copied."""

    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            self.num_copied += len(found)
        return found


def test_a_long_text_is_searched_without_copies_of_it() -> None:
    num_tokens = 500
    item = ReadMedia("image", "key", EncoderInput({"pixels": np.zeros(1)}, ()), "image 0")
    expanded = [Expanded(item, Expansion([IMAGE] * num_tokens, [True] * num_tokens))]
    for rest, expected in (([IMAGE] * num_tokens, [(expanded[0], 2000)]), ([IMAGE], None)):
        prompt = CountedTokens([TEXT] * 2000 + rest + [TEXT] * 2000)
        assert find_expanded(prompt, expanded, {IMAGE: "image"}) == expected
        assert prompt.num_copied <= num_tokens
