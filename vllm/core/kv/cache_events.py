"""Record the events of the prefix cache for other programs, such as a router.

The cache appends events in the order in which they happen; the engine drains and publishes them. A
router that knows which blocks an engine holds can send it the requests that share them. If layers
form several groups, the events describe the first group. It has full attention if any layer has, so
every hit needs blocks of this group.
"""

from collections.abc import Sequence
from hashlib import sha256

from vllm.core.kv.block_hash import is_of_first_group
from vllm.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EngineRequest,
    MediaItem,
    number_of,
)

_HASH_BYTES = 8
"""Bytes of a block's hash (of 32) that events have: subscribers take 64-bit integers."""


class CacheEventLog:
    """Collects the events since the last call of `drain`.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[CacheEvent] = []

    def stored(
        self,
        hashes: Sequence[bytes],
        stored: Sequence[int],
        token_ids: Sequence[int],
        source: EngineRequest | None = None,
    ) -> None:
        """Record that blocks of a request were added to the prefix cache.

        Args:
            hashes: hashes of all blocks of the request, up to the last added one.
            stored: indices into `hashes` of the added blocks, ascending.
            token_ids: tokens of the request.
            source: the request; None: it has neither an adapter nor media.
        """
        first = 0
        for position, index in enumerate(stored):
            if position + 1 < len(stored) and stored[position + 1] == index + 1:
                continue  # the next stored block continues this run
            self._append_run(hashes, stored[first], index + 1, token_ids, source)
            first = position + 1

    def removed(self, hashes: Sequence[bytes]) -> None:
        """Record that blocks were removed from the prefix cache. Only the first group of layers is
        reported.
        """
        removed = [public_hash(key) for key in hashes if is_of_first_group(key)]
        if removed:
            self._events.append(BlockRemoved(block_hashes=removed))

    def cleared(self) -> None:
        """Record that the prefix cache was emptied."""
        self._events.append(AllBlocksCleared())

    def drain(self) -> list[CacheEvent]:
        """Return the events and empty the log."""
        events, self._events = self._events, []
        return events

    def _append_run(
        self,
        hashes: Sequence[bytes],
        start: int,
        end: int,
        token_ids: Sequence[int],
        source: EngineRequest | None,
    ) -> None:
        size = self._block_size
        adapter = None if source is None else source.adapter
        media = () if source is None else source.media
        spans = [(index * size, (index + 1) * size) for index in range(start, end)]
        keys = [_media_of(media, *span) for span in spans] if media else []
        self._events.append(
            BlockStored(
                block_hashes=list(map(public_hash, hashes[start:end])),
                parent_block_hash=public_hash(hashes[start - 1]) if start else None,
                token_ids=list(token_ids[start * size : end * size]),
                block_size=size,
                lora_id=number_of(adapter),
                lora_name=None if adapter is None else adapter.name,
                extra_keys=keys if any(keys) else None,
            )
        )


def _media_of(media: Sequence[MediaItem], start: int, end: int) -> list[tuple[str, int]] | None:
    """Return the media items of a request that are part of the content of a block.

    Returns:
        (hash of the item, index of its first token relative to `start`) for each; None if there are
        none.
    """
    return [
        (sha256(item.key.encode("utf-8", "surrogatepass")).hexdigest(), item.start - start)
        for item in media
        if item.start < end and item.end > start
    ] or None


def public_hash(block_hash: bytes) -> int:
    """Return the hash of a block as events report it: its last 64 bits."""
    return int.from_bytes(block_hash[-_HASH_BYTES:], "big")
