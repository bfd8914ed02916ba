"""Convert log-probabilities from the arrays of the core to the form for users."""

from collections.abc import Callable

from vllm.messages import LogprobRows
from vllm.outputs import Logprob

TextOf = Callable[[int], str]
"""Token id -> its text."""


def to_dicts(rows: LogprobRows, num_top: int, text_of: TextOf | None) -> list[dict[int, Logprob]]:
    """Convert log-probabilities to one dict per position: token id -> Logprob, the sampled (or
    actual) token first.

    Args:
        rows: log-probabilities of consecutive positions.
        num_top: number of most likely tokens to return. If the sampled token is not among them, the
            dict has one more entry.
        text_of: returns the text of a token; None without a tokenizer.
    """
    columns = slice(0, 1 + num_top)
    positions = zip(
        rows.token_ids[:, columns].tolist(),
        rows.logprobs[:, columns].tolist(),
        rows.ranks.tolist(),
        strict=True,
    )
    return [_to_dict(ids, logprobs, rank, text_of) for ids, logprobs, rank in positions]


def _to_dict(
    token_ids: list[int], logprobs: list[float], rank: int, text_of: TextOf | None
) -> dict[int, Logprob]:
    # Column 0 is the sampled token; from column 1 on, the column is the rank.
    entries: dict[int, Logprob] = {}
    for column, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        if token_id not in entries:
            text = None if text_of is None else text_of(token_id)
            entries[token_id] = Logprob(logprob, column or rank, text)
    return entries
