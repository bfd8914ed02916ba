"""Content hashes of KV blocks.

A block's keys and values depend on every token before them, so its hash covers the hash of the
block before it, its own token ids, and what else decides the content from a position in it on
(`CacheKey`: an adapter, an image). The root covers the cache salt. So requests share the blocks
before the first position at which they differ in any of these. SHA-256: a collision would show one
user another's text, and Python's hash can be made to collide.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from vllm.messages import CacheKey, EngineRequest

_TOKEN_BYTES = array("i").itemsize


def root_hash(request: EngineRequest) -> bytes:
    """Return the hash that is the parent of a request's first block."""
    salt = _encoded(request.cache_salt or "")
    return sha256(b"vllm-block" + salt).digest()


def block_hashes(
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    keys: Sequence[CacheKey] = (),
    start: int = 0,
) -> list[bytes]:
    """Return the hashes of consecutive blocks that follow `parent`; a last block that is not full
    has none.

    Args:
        parent: hash of the block before the first one, or of the root.
        token_ids: of the blocks.
        block_size: tokens per block.
        keys: of the request, all of them.
        start: position of the first of the tokens.
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
    """Return the keys by which blocks of a group of layers are found. The keys of the first group
    are the hashes."""
    if not group:
        return hashes
    suffix = group.to_bytes(2, "little")
    return (block_hash + suffix for block_hash in hashes)


def is_of_first_group(key: bytes) -> bool:
    """Whether a key is one of the first group, so the hash itself."""
    return len(key) == sha256().digest_size


def _keys_of_blocks(keys: Sequence[CacheKey], block_size: int, start: int) -> dict[int, bytes]:
    """Return the keys that begin in each block, encoded, by the index of the block after
    `start`."""
    found: dict[int, bytes] = {}
    for key in keys:
        index, offset = divmod(key.start - start, block_size)
        found[index] = found.get(index, b"") + offset.to_bytes(8, "little") + _encoded(key.key)
    return found


def _encoded(text: str) -> bytes:
    """Encode the key with its length in front, so that ("ab", "c") and ("a", "bc") differ."""
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data
