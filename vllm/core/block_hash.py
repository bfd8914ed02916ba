"""Content hashes of KV blocks.

A block's keys and values depend on every token before them, so its hash covers the hash of the
block before it, its own token ids, and, at the root, everything else that decides the content
(cache salt, LoRA, media). SHA-256: a collision would show one user another's text, and Python's
hash can be made to collide.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from vllm.messages import EngineRequest


def root_hash(request: EngineRequest) -> bytes:
    """The parent of a request's first block."""
    digest = sha256(b"vllm-block")
    for key in (request.cache_salt or "", *request.cache_extra_keys):
        data = key.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))  # keeps ("ab", "c") apart from ("a", "bc")
        digest.update(data)
    return digest.digest()


def block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of consecutive blocks that follow `parent`; a last block not full has none."""
    width = block_size * 8
    data = array("q", token_ids).tobytes()
    hashes = []
    for end in range(width, len(data) + 1, width):
        parent = sha256(parent + data[end - width : end]).digest()
        hashes.append(parent)
    return hashes
