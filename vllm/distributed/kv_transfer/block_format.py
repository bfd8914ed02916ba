"""Encode a KV block for files and for the network.

magic, key, SHA-256 of what follows, number of ranks, bytes of each rank, data
"""

import struct
from hashlib import sha256

from vllm.distributed.kv_transfer.interface import BlockData

_MAGIC = b"KVBLOCK1"
_HEAD = struct.Struct("<8s32s32sI")
_LENGTH = struct.Struct("<Q")
_MAX_RANKS = 4096
MAX_HEAD_BYTES = _HEAD.size + _MAX_RANKS * _LENGTH.size
"""Maximum size of the header of a block in this format."""


def compose(key: bytes, block: BlockData) -> list[bytes]:
    """Return the encoded bytes of a block, in several parts."""
    lengths = [_LENGTH.pack(len(part)) for part in block]
    digest = sha256(_LENGTH.pack(len(block)))
    for part in (*lengths, *block):
        digest.update(part)
    return [_HEAD.pack(_MAGIC, key, digest.digest(), len(block)), *lengths, *block]


def parse(key: bytes, data: bytes) -> BlockData | None:
    """Decode the block of a key; None if the data has the wrong length or key, or does not match
    its checksum.
    """
    if len(data) < _HEAD.size:
        return None
    magic, found_key, checksum, count = _HEAD.unpack_from(data)
    start = _HEAD.size + count * _LENGTH.size
    if magic != _MAGIC or found_key != key or not 0 < count <= _MAX_RANKS or len(data) < start:
        return None
    digest = sha256(_LENGTH.pack(count))
    digest.update(memoryview(data)[_HEAD.size :])
    if digest.digest() != checksum:
        return None
    block = []
    for index in range(count):
        (length,) = _LENGTH.unpack_from(data, _HEAD.size + index * _LENGTH.size)
        block.append(data[start : start + length])
        start += length
    return block if start == len(data) else None
