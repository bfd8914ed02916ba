"""Relative costs of padded batches, for comparing buckets with each other.

For 8 billion weights, 32 layers and a hidden size of 4096: 16 billion FLOPs a token, and 524
thousand for each key that it attends to: a ratio of 30,500 to 1.
"""

from typing import Any, TypeVar

NumberT = TypeVar("NumberT", float, Any)
"""A number, or an array of numpy."""

_TOKEN = 65536
"""Cost of the linear layers for one token of a prompt, where a key costs 2."""


def prefill_cost(num_tokens: int, query_len: int, num_blocks: int) -> int:
    """Return the relative cost of a prefill: its tokens, times the work per token.

    A token attends to half of the prompt on average, and to 128 keys in each block of context.

    Args:
        num_tokens: tokens of the batch, padding included.
        query_len: tokens of each request.
        num_blocks: context blocks of each request.
    """
    return num_tokens * (_TOKEN + query_len + 256 * num_blocks)


def decode_cost(num_tokens: int, num_blocks: int) -> int:
    """Return the relative cost of a decode: 1 for each token, and 1 for each block that is read.

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

_LAUNCH_S = 8.5e-3
_PREFILL_TOKEN_S = 62e-6
_KEY_S = 2.4e-9
_DECODE_TOKEN_S = 37e-6
_BLOCK_S = 8.4e-6
_CONTEXT_BLOCK_S = 18e-6
_BLOCK_TOKENS = 128


def forward_seconds(
    phase: NumberT, batch: NumberT, query_len: NumberT, blocks: NumberT, block_size: int = 128
) -> NumberT:
    """Predict the seconds of a padded forward pass, of an 8B model in bfloat16 on a Gaudi 2.

    It is used for fractions of padding and for comparing buckets, where a common factor has no
    effect. It is a sum of terms that were fitted to published runs: launch and weights, tokens,
    keys, KV blocks.

    Args:
        phase: 0 for a prefill, 1 for a decode; all sizes may be scalars or arrays.
        batch: requests.
        query_len: tokens of each request.
        blocks: KV blocks, of each request in a prefill, of all together in a decode.
        block_size: tokens of a block.
    """
    tokens, scale = batch * query_len, block_size / _BLOCK_TOKENS
    decode = tokens * _DECODE_TOKEN_S + blocks * (_BLOCK_S * scale)
    keys = query_len * 0.5 + blocks * block_size
    prefill = tokens * (_PREFILL_TOKEN_S + keys * _KEY_S) + batch * blocks * (
        _CONTEXT_BLOCK_S * scale
    )
    return _LAUNCH_S + phase * decode + (1 - phase) * prefill
