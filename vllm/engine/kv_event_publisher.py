"""Publish the events of the KV cache over ZMQ, and resend the batches that a subscriber missed.

    PUB      (topic, number of the batch, batch)             one per step with events
    ROUTER   (b"", number)  ->  (b"", number, batch) ...     from that number on
                                (b"", -1, b"")               and the end

Sequence numbers are 8 bytes, big-endian, from 0 on; batches are msgpack of `KVEventBatch`. Two
threads do the sending, so that the engine never waits: it only puts a batch into a queue.
"""

import queue
import threading
import time
from collections import deque

import msgspec
import zmq

from vllm.config.observability import KVEventsConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.messages import CacheEvent, KVEventBatch

logger = init_logger(__name__)

_LINGER_MS = 1000
"""Milliseconds for sending the rest when the sockets are closed."""
_CLOSE_POLL_S = 0.1
_NUMBER_BYTES = 8
_END_OF_REPLAY = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_DROPS_PER_WARNING = 1000

_Batch = tuple[int, float, list[CacheEvent]]


class KVEventPublisher:
    """Sends batches of events to all subscribers, until it is closed.

    Args:
        config: config with the publisher "zmq".

    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._queue: queue.Queue[_Batch | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._kept_lock = threading.Lock()
        self._next_number = 0
        self._num_dropped = 0
        self._is_closed = False
        self._context = zmq.Context(io_threads=1)
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            publisher = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            threads = [threading.Thread(target=self._publish, args=(publisher,), daemon=True)]
            if config.replay_endpoint is not None:
                # A replay sends all kept batches and an end mark; the socket must be able to queue
                # all of them.
                hwm = max(config.hwm, config.buffer_steps + 1) if config.hwm else 0
                router = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, hwm)
                threads.append(threading.Thread(target=self._replay, args=(router,), daemon=True))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._threads = threads
        for thread in threads:
            thread.start()
        logger.info("publishing events of the KV cache at %s", config.endpoint)

    def publish(self, events: list[CacheEvent]) -> None:
        """Send events as one batch without waiting. If the queue is full, the batch is dropped."""
        batch = (self._next_number, time.time(), events)
        self._next_number += 1
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            if self._num_dropped % _DROPS_PER_WARNING == 0:
                logger.warning(
                    "%d batches of KV cache events were dropped, because %d batches wait to be "
                    "published already (max_queue_size of kv_events_config)",
                    self._num_dropped + 1,
                    self._queue.maxsize,
                )
            self._num_dropped += 1

    def close(self) -> None:
        """Send the queued batches and close the sockets. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        while self._threads[0].is_alive():
            try:
                self._queue.put(None, timeout=_CLOSE_POLL_S)
                break
            except queue.Full:
                continue  # the thread empties the queue; if it has died, the loop ends
        self._threads[0].join()
        self._context.term()  # wakes the other thread, which closes its socket

    def _open(self, kind: int, name: str, endpoint: str, hwm: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.linger = _LINGER_MS
        is_bound = kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint
        try:
            if is_bound or not endpoint.startswith("tcp://"):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"kv_events_config: {name} {endpoint!r} cannot be used: {error}; choose another "
                "address or port"
            ) from None
        return socket

    def _publish(self, socket: "zmq.Socket[bytes]") -> None:
        with socket:
            while (batch := self._queue.get()) is not None:
                number, timestamp, events = batch
                data = self._encode(KVEventBatch(ts=timestamp, events=events))
                with self._kept_lock:
                    self._kept.append((number, data))
                socket.send_multipart((self._topic, _frame(number), data))

    def _replay(self, socket: "zmq.Socket[bytes]") -> None:
        with socket:
            while True:
                try:
                    client, *rest = socket.recv_multipart()
                except zmq.ContextTerminated:
                    return
                if len(rest) != 2 or rest[0] or len(rest[1]) != _NUMBER_BYTES:
                    logger.debug("the replay endpoint got a message that is not a batch number")
                    continue
                first = int.from_bytes(rest[1], "big")
                with self._kept_lock:
                    wanted = [(number, data) for number, data in self._kept if number >= first]
                for number, data in wanted:
                    socket.send_multipart((client, b"", _frame(number), data))
                socket.send_multipart((client, b"", _END_OF_REPLAY, b""))


def _frame(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")
