"""Costs of padded batches, to compare buckets with each other.

For 8 billion weights, 32 layers and a hidden size of 4096: 16 billion FLOPs a token, 524 thousand
for a key that it attends to, 30,500 to 1.
"""

_TOKEN = 65536
"""Cost of the linear layers for one token of a prompt, where a key costs 2."""


def prefill_cost(num_tokens: int, query_len: int, num_blocks: int) -> int:
    """Return the cost of a prefill: tokens, times the work of one of them.

    Half of the prompt is attended to on average, and 128 keys in a block of context.

    Args:
        num_tokens: tokens of the batch, padding included.
        query_len: tokens of each request.
        num_blocks: context blocks of each request.
    """
    return num_tokens * (_TOKEN + query_len + 256 * num_blocks)


def decode_cost(num_tokens: int, num_blocks: int) -> int:
    """Return the cost of a decode: one for each token, one for each block that is read.

    Args:
        num_tokens: tokens of the batch, padding included.
        num_blocks: blocks of all requests together.
    """
    return num_tokens + num_blocks


PREFILL_LAUNCH_COST = prefill_cost(32, 32, 0)
"""Cost of one more prefill without its tokens: host time, and weights that are read again."""

GATHER_COST = 2
"""Cost of a gathered block in a decode, relative to one of a slice. Predicted, not measured: keys
and values move three times (read, copied, read again), but scores take the same time for both."""
