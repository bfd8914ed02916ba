"""Move KV blocks between the KV cache and a connector, between two steps.

    a request is next   blocks that the connector has and the cache lacks are written into free
                        blocks, and can then be found like any cached prefix
    a request leaves    its full blocks are read, before a step can write over them, and saved;
                        its last output is held back until other engines can find them

The scheduler and the workers are not involved.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from hashlib import sha256

from vllm.config import KVTransferConfig
from vllm.core.kv.block_hash import block_hashes, root_hash
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.distributed.kv_transfer import BlockData, KVConnector
from vllm.executor import Executor, Worker
from vllm.logger import init_logger
from vllm.messages import EngineOutput, EngineRequest, TransferStats
from vllm.request import Request

logger = init_logger(__name__)


class KVTransfer:
    """Loads and saves KV blocks of one engine core through its connector.

    Args:
        connector: storage of blocks; `close` closes it.
        cache: KV cache with one group of layers, and prefix caching.
        executor: started executor of the workers.
    """

    def __init__(self, connector: KVConnector, cache: KVCacheManager, executor: Executor) -> None:
        self._connector = connector
        self._cache = cache
        self._executor = executor
        self._waiting: set[str] = set()
        """Ids of requests whose blocks have not been loaded yet."""
        self._last_outputs: deque[tuple[Future[None], EngineOutput]] = deque()
        """Last outputs of requests that have ended, each with the future that is done when its
        blocks are written. In the order of their ends."""
        self._is_open = False
        self._namespace: str | None = None
        self._is_mixed = False
        """The KV cache has blocks of other weights, so none may be saved."""
        self._saves, self._loads = connector.config.saves, connector.config.loads
        self._num_queries = self._num_hits = 0
        self._num_loaded_bytes = self._num_saved_bytes = 0
        connector.block_bytes = sum(executor.call(Worker.block_bytes))
        _log_size(connector.config, connector.block_bytes)
        if self._saves:
            cache.freed = []
        self._open()

    def prepare(self, request: EngineRequest) -> "Future[None] | None":
        """Begin to read the blocks of a request.

        Returns:
            A future that is done when they are read; None if there are none.
        """
        if not self._can_load(request):
            return None
        self._open()
        keys = self._keys(request)
        num_cached = len(self._cache.pool.find(keys))
        return self._connector.prefetch(keys[num_cached:]) if num_cached < len(keys) else None

    def enter(self, request: EngineRequest) -> None:
        """Record that a request is waiting from now on."""
        if self._can_load(request):
            self._waiting.add(request.request_id)

    def load_next(self, requests: Iterable[Request]) -> None:
        """Load the blocks of the requests that may be admitted next.

        Blocks are loaded only for as many requests as fit into the free blocks together: blocks of
        further requests would evict these before they are used.

        Args:
            requests: waiting requests, in the order of admission.
        """
        if not self._waiting:
            return
        cache, pool = self._cache, self._cache.pool
        room, taken = pool.num_free, set[int]()
        for request in requests:
            shared = cache.find_prefix(request)
            own = cache.num_blocks_for(len(request.token_ids)) - len(shared)
            room -= own + pool.num_free_among([each for each in shared if each not in taken])
            if room < 0:
                return
            if request.request_id in self._waiting:
                self._waiting.discard(request.request_id)
                self._restore(request.spec)
                shared = cache.find_prefix(request)
            taken.update(shared)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests, which then get no output; unknown ids are ignored."""
        ids = set(request_ids)
        self._waiting -= ids
        outputs = [(written, output.split(ids)[1]) for written, output in self._last_outputs]
        self._last_outputs = deque(each for each in outputs if each[1].finished)

    @property
    def has_outputs(self) -> bool:
        """Whether outputs of requests are held back."""
        return bool(self._last_outputs)

    def take_output(self, timeout_s: float = 0.0) -> EngineOutput | None:
        """Return the last output of requests whose blocks are written. Each output is returned
        once.

        Args:
            timeout_s: seconds to wait for an output.
        """
        if not self._last_outputs:
            return None
        written, output = self._last_outputs[0]
        if not written.done() and not (timeout_s and wait([written], timeout_s).done):
            return None
        self._last_outputs.popleft()
        written.result()
        return output

    def end(self, output: EngineOutput) -> EngineOutput:
        """Save the blocks of the requests that finished in a step.

        Args:
            output: output of the step.

        Returns:
            The part of the output that can be sent now. `take_output` returns the rest later.
        """
        self._waiting.difference_update(output.finished)
        written = self.save_freed()
        if written is None or not output.finished:
            return output
        last, rest = output.split(output.finished)
        self._last_outputs.append((written, last))
        return rest

    def save_freed(self) -> "Future[None] | None":
        """Save the blocks of requests that have left. Call this before a step or a load that may
        overwrite them.

        Returns:
            The future of `KVConnector.save`.
        """
        cache = self._cache
        if cache.forgotten:
            forgotten, cache.forgotten = cache.forgotten, []
            self._connector.drop(forgotten)
        if not cache.freed:
            return None
        freed, cache.freed = dict(cache.freed), []
        keys = list(freed.values())
        block_ids = list(freed)
        self._open()
        wanted = self._connector.missing(keys)
        if not wanted or self._is_mixed:
            return None
        keys = [keys[index] for index in wanted]
        parts = self._executor.call(Worker.read_blocks, [block_ids[index] for index in wanted])
        blocks: list[BlockData] = [list(ranks) for ranks in zip(*parts, strict=True)]
        self._num_saved_bytes += _num_bytes(blocks)
        return self._connector.save(keys, blocks)

    def reset(self) -> None:
        """Reset the saved state after the prefix cache was emptied, perhaps because the weights
        will change.
        """
        if self._cache.freed is not None:
            self._cache.freed = []
        self._is_open = self._is_mixed = False
        self._namespace = None

    def check_weights(self) -> None:
        """Stop saving blocks, because a worker method that the user called may have changed the
        weights.
        """
        self._is_open = False

    @property
    def stats(self) -> TransferStats:
        """Counts of blocks that were looked up, loaded and saved since the start."""
        return TransferStats(
            num_queries=self._num_queries,
            num_hits=self._num_hits,
            num_loaded_bytes=self._num_loaded_bytes,
            num_saved_bytes=self._num_saved_bytes,
        )

    def close(self) -> None:
        """Finish writing and close the connector."""
        self._connector.close()

    def _open(self) -> None:
        """Find the namespace of the blocks, if the weights may have changed."""
        if self._is_open:
            return
        prints = self._executor.call(Worker.cache_fingerprint)
        namespace = sha256(b"".join(prints)).hexdigest()[:32]
        if self._namespace not in (None, namespace) and not self._is_mixed:
            self._is_mixed = True
            logger.warning(
                "the weights have changed and the prefix cache was not emptied: no KV blocks are "
                "saved until reset_prefix_cache is called"
            )
        self._namespace = namespace
        self._connector.open(namespace)
        self._is_open = True

    def _can_load(self, request: EngineRequest) -> bool:
        return self._loads and request.sampling_params.prompt_logprobs is None

    def _keys(self, request: EngineRequest) -> list[bytes]:
        """Return the keys of the prompt's blocks, without the last token, which must be
        computed.
        """
        return block_hashes(
            root_hash(request),
            request.prompt_token_ids[:-1],
            self._cache.block_size,
            request.cache_extra_keys,
        )

    def _restore(self, request: EngineRequest) -> None:
        self._open()
        keys, size = self._keys(request), self._cache.block_size
        self._num_queries += (len(keys) - len(self._cache.pool.find(keys))) * size
        num_loaded = self._cache.restore(
            keys, request.prompt_token_ids, self._connector.load, self._write, request
        )
        self._num_hits += num_loaded * size
        if num_loaded:
            logger.debug("loaded %d KV blocks for the request %s", num_loaded, request.request_id)

    def _write(self, block_ids: list[int], blocks: list[BlockData]) -> bool:
        self.save_freed()
        if not all(self._executor.call(Worker.write_blocks, block_ids, blocks)):
            return False
        self._num_loaded_bytes += _num_bytes(blocks)
        return True


def _num_bytes(blocks: Iterable[BlockData]) -> int:
    return sum(len(part) for block in blocks for part in block)


def _log_size(config: KVTransferConfig, block_bytes: int) -> None:
    """Log which blocks are kept and how much memory they take."""
    num_blocks = int(config.kv_buffer_size / block_bytes)
    logger.info(
        "KV blocks are also kept outside of the KV cache: connector %s, role %s, %.2f GB of host "
        "memory for at most %d blocks",
        config.kv_connector,
        config.kv_role,
        config.kv_buffer_size / 1e9,
        num_blocks,
    )
    if not num_blocks:
        logger.warning(
            "kv_transfer_config: kv_buffer_size is %d bytes, and a KV block has %d: no block fits "
            "into host memory. Set a larger kv_buffer_size",
            config.kv_buffer_size,
            block_bytes,
        )
