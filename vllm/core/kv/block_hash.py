"""Compute content hashes of KV blocks.

The keys and values of a block depend on all tokens before them. So the hash of a block covers the
hash of the previous block, its own token ids, and anything else that changes the content from some
position on (`CacheKey`: an adapter or an image). The root hash covers the cache salt. So requests
share the blocks before the first position at which they differ in any of these. The hash is
SHA-256, because a collision would show one user the text of another, and Python's own hash can be
made to collide.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from vllm.messages import CacheKey, EngineRequest

_TOKEN_BYTES = array("i").itemsize


def root_hash(request: EngineRequest) -> bytes:
    """Return the hash that acts as the parent of a request's first block. It depends on the cache
    salt.
    """
    salt = _encoded(request.cache_salt or "")
    return sha256(b"vllm-block" + salt).digest()


def block_hashes(
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    keys: Sequence[CacheKey] = (),
    start: int = 0,
) -> list[bytes]:
    """Return the hashes of the full blocks that follow `parent`. A last, partial block has no hash.

    Args:
        parent: hash of the block before the first one, or the root hash.
        token_ids: tokens of the blocks.
        block_size: tokens per block.
        keys: all cache keys of the request.
        start: position of the first token of `token_ids`.
    """
    data = array("i", token_ids).tobytes()
    width = block_size * _TOKEN_BYTES
    extra = _keys_of_blocks(keys, block_size, start) if keys else {}
    hashes: list[bytes] = []
    # A fast path, because a prompt of 32K tokens has 2,048 blocks and most have no extra keys.
    if not extra:
        add = hashes.append
        for begin in range(0, len(data) - width + 1, width):
            parent = sha256(parent + data[begin : begin + width]).digest()
            add(parent)
        return hashes
    for begin in range(0, len(data) - width + 1, width):
        keys_of_block = extra.get(len(hashes), b"")
        parent = sha256(parent + data[begin : begin + width] + keys_of_block).digest()
        hashes.append(parent)
    return hashes


def group_keys(hashes: Iterable[bytes], group: int) -> Iterable[bytes]:
    """Return the keys under which the blocks of one group of layers are cached.

    The first group (0) uses the hashes themselves; other groups add their number.
    """
    if not group:
        return hashes
    suffix = group.to_bytes(2, "little")
    return (block_hash + suffix for block_hash in hashes)


def is_of_first_group(key: bytes) -> bool:
    """Return whether a key belongs to the first group of layers, so is a hash without a suffix."""
    return len(key) == sha256().digest_size


def _keys_of_blocks(keys: Sequence[CacheKey], block_size: int, start: int) -> dict[int, bytes]:
    """Return the encoded cache keys that begin in each block, by the index of the block from
    `start` on.
    """
    found: dict[int, bytes] = {}
    for key in keys:
        index, offset = divmod(key.start - start, block_size)
        found[index] = found.get(index, b"") + offset.to_bytes(8, "little") + _encoded(key.key)
    return found


def _encoded(text: str) -> bytes:
    """Encode a string with its length before it, so that ("ab", "c") and ("a", "bc") differ."""
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data
