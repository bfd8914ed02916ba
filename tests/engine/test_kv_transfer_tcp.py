"""Test KV blocks over TCP: saved blocks arrive.

Whatever a peer sends or does not send, it is not accepted as a block and does not stop an engine.
"""

import itertools
import random
import socket
import struct
import threading
from contextlib import contextmanager, suppress

import pytest

from tests.reach import port_of
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import block_peers, tcp
from vllm.distributed.kv_transfer.block_format import compose
from vllm.distributed.kv_transfer.block_peers import (
    BLOCK,
    END,
    OTHER_NAMESPACE,
    REQUEST,
    BlockPeer,
)
from vllm.distributed.kv_transfer.choose import make_connector
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.resolve.replicas import replica_configs
from vllm.errors import ConfigError
from vllm.utils.process.frames import frame, frame_header, read_frame

KEYS = [bytes([number]) * 32 for number in range(8)]
BLOCKS = [[bytes([number]) * 1000, b"second rank"] for number in range(8)]


@contextmanager
def connector(namespace="model", **fields):
    made = make_connector(
        KVTransferConfig.from_mapping({"kv_connector": "TCPConnector", "kv_port": 0, **fields})
    )
    made.open(namespace)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def consumer(*ports, namespace="model", timeout_s=30.0, **fields):
    extra = {"peers": [f"127.0.0.1:{port}" for port in ports], "timeout_s": timeout_s}
    with connector(
        namespace, kv_role="kv_consumer", kv_connector_extra_config=extra, **fields
    ) as made:
        yield made


def fetched(made, keys):
    future = made.prefetch(keys)
    assert future is None or future.result() is None
    return made.load(keys)


def test_blocks_come_from_the_engines_that_have_them():
    with connector() as one, connector() as other:
        one.save(KEYS[:3], BLOCKS[:3])
        other.save(KEYS[3:5], BLOCKS[3:5])
        assert one.missing(KEYS[:4]) == [3]
        with consumer(port_of(one), port_of(other)) as made:
            assert fetched(made, KEYS) == BLOCKS[:5]
            one.drop(KEYS[:3])
            other.drop(KEYS[3:5])
            assert fetched(made, KEYS) == BLOCKS[:5]  # these blocks are in host memory now
            made.open("other weights")
            assert made.load(KEYS) == []
            made.open("model")
            assert fetched(made, KEYS) == []
        with consumer(port_of(one), kv_buffer_size=2500) as made:
            one.save(KEYS[:3], BLOCKS[:3])
            # No more blocks are read than host memory can hold.
            assert fetched(made, KEYS) == BLOCKS[:2]


def test_a_producer_asks_nobody_and_a_consumer_sends_nothing():
    with connector(kv_role="kv_producer") as made:
        assert made.prefetch(KEYS) is None
    with consumer(1) as made:
        assert port_of(made) is None


def test_blocks_of_another_model_are_not_sent(capsys):
    with connector(namespace="a") as one, consumer(port_of(one), namespace="b") as made:
        one.save(KEYS, BLOCKS)
        assert fetched(made, KEYS) == []
        assert "its model, weights, or layout of the KV cache" in capsys.readouterr().err
        assert made.prefetch(KEYS) is None  # the peer that failed is not asked again at once


def peer_that_sends(data: bytes | None) -> tuple[int, threading.Thread]:
    """Listen for one connection and send `data`; None: send nothing while the other side waits."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            read_frame(connection.recv)
            if data is None:
                connection.recv(1)
            else:
                connection.sendall(data)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


def answer_of(*blocks: bytes, end: bytes = frame(END, b"")) -> bytes:
    return b"".join(frame(BLOCK, block) for block in blocks) + end


def sent(number: int) -> bytes:
    return b"".join(compose(KEYS[number], BLOCKS[number]))


ONE = sent(0)


@pytest.mark.parametrize(
    ("data", "num_blocks", "reason"),
    [
        (b"", 0, "ended early"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 0, "not an engine of this version"),
        (answer_of(end=frame(REQUEST, b"")), 0, "not an engine of this version"),
        (answer_of(ONE, end=frame(OTHER_NAMESPACE, b"")), 1, "differ from this engine's"),
        (answer_of(ONE, end=b""), 1, "ended early"),
        (answer_of(ONE, end=b"")[:-1], 0, "ended early"),
        (answer_of(ONE), 1, None),
        (answer_of(ONE, ONE), 1, "damaged block"),
        (answer_of(ONE, sent(2)), 1, "damaged block"),
        (answer_of(ONE[:-1] + b"x"), 0, "damaged block"),
        (answer_of(ONE, b""), 1, "damaged block"),
        (frame_header(BLOCK, 1 << 62), 0, None),
        (frame_header(BLOCK, 1 << 63), 0, "announced a message of"),
        (None, 0, "timed out"),
    ],
)
def test_what_is_not_a_block_is_not_taken_for_one(data, num_blocks, reason, capsys):
    port, thread = peer_that_sends(data)
    with consumer(port, timeout_s=30.0 if data is not None else 0.05) as made:
        assert fetched(made, KEYS[:3]) == BLOCKS[:num_blocks]
        log = capsys.readouterr().err
        assert (f"127.0.0.1:{port}: " in log and reason in log) if reason else not log
    thread.join()


@pytest.mark.parametrize(("block_bytes", "num_blocks"), [(1011, 1), (None, 2)])
def test_a_block_that_is_larger_than_those_here_is_not_received(block_bytes, num_blocks, capsys):
    large = b"".join(compose(KEYS[1], [bytes(100_000)]))
    port, thread = peer_that_sends(answer_of(ONE, large))
    with consumer(port) as made:
        made.block_bytes = block_bytes
        assert len(fetched(made, KEYS[:3])) == num_blocks
    assert ("a block of an unexpected size" in capsys.readouterr().err) == (num_blocks == 1)
    thread.join()


def test_a_peer_that_fails_is_left_alone_for_a_while_and_then_asked_again(capsys):
    now = 0.0
    with connector() as one:
        one.save(KEYS, BLOCKS)
        peer = BlockPeer("127.0.0.1", port_of(one), 1 << 20, lambda: now)
        assert len(peer.fetch("model", KEYS, 30.0)) == 8 and peer.is_asked
        one.open("new weights")
        for _ in range(2):
            assert peer.fetch("model", KEYS, 30.0) == [] and not peer.is_asked
            now += block_peers.PAUSE_S
            assert peer.is_asked
        one.open("model")
        one.save(KEYS[:1], BLOCKS[:1])
        assert peer.fetch("model", KEYS, 30.0) == [(KEYS[0], BLOCKS[0])]
    log = capsys.readouterr().err
    assert log.count("differ from this engine's") == 1 and log.count("are available again") == 1
    assert peer.fetch("model", KEYS, 30.0) == [] and not peer.is_asked
    assert "no KV blocks from the engine at 127.0.0.1:" in capsys.readouterr().err


def test_a_server_survives_what_is_sent_to_it():
    rng = random.Random(1)
    with connector() as one:
        one.save(KEYS, BLOCKS)
        address = ("127.0.0.1", port_of(one))
        head = frame(REQUEST, struct.pack("<8s32s", b"KVPEERS2", b"model"))
        other = frame(REQUEST, struct.pack("<8s32s", b"KVPEERS1", b"model"))
        long = frame_header(REQUEST, 1 << 30)
        for data in (
            b"",
            head[:-1],
            head[:20],
            other,
            long,
            frame(REQUEST, b"x"),
            *(rng.randbytes(rng.randrange(200)) for _ in range(20)),
        ):
            # The peer may close the connection before everything is sent.
            with socket.create_connection(address, 30) as connection, suppress(OSError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""
        with consumer(address[1]) as made:
            assert fetched(made, KEYS) == BLOCKS


def test_a_peer_has_a_limited_time_for_its_whole_request(monkeypatch):
    hours = itertools.count(step=20.0)
    monkeypatch.setattr(block_peers.time, "monotonic", lambda: next(hours))
    with connector() as one, socket.create_connection(("127.0.0.1", port_of(one)), 30) as slow:
        slow.sendall(frame_header(REQUEST, 72) + b"KVPEERS2")  # the rest of the frame never arrives
        assert slow.recv(1) == b""


class SlowPeer:
    """Another engine, which does something before it answers."""

    is_asked = True

    def __init__(self, event):
        self.event, self.num_asked = event, 0

    def fetch(self, namespace, keys, timeout_s, block_bytes):
        self.num_asked += 1
        self.event()
        return list(zip(keys, BLOCKS, strict=False))


def test_what_comes_while_the_weights_change_is_not_taken_for_blocks_of_the_new_ones(monkeypatch):
    peer = SlowPeer(lambda: made.open("new weights"))
    monkeypatch.setattr(tcp, "BlockPeer", lambda *_: peer)
    with consumer(1) as made:
        assert fetched(made, KEYS) == []


def test_requests_with_the_same_prompt_fetch_its_blocks_once(monkeypatch):
    go = threading.Event()
    peer = SlowPeer(go.wait)
    monkeypatch.setattr(tcp, "BlockPeer", lambda *_: peer)
    with consumer(1) as made:
        first, second = made.prefetch(KEYS), made.prefetch(KEYS)
        go.set()
        assert first is second and first.result() is None
        assert peer.num_asked == 1 and made.load(KEYS) == BLOCKS
        assert made.prefetch(KEYS) is None
        made.drop(KEYS)
        assert fetched(made, KEYS) == BLOCKS and peer.num_asked == 2, "the fetch was forgotten"


# ---- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_port": 70_000}, "kv_port must be an integer from 0 to 65535, got 70000"),
        ({"kv_port": "14579"}, "kv_port must be an integer"),
        ({"kv_ip": ""}, "kv_ip must be an address, got ''"),
        ({"kv_ip": "a..b"}, "kv_ip must be an address, got 'a..b'"),
        ({"kv_connector_extra_config": {"peers": ["a..b:1"]}}, "peers has 'a..b:1'"),
        ({"kv_connector_extra_config": {"timeout_s": float("inf")}}, "at most 86400, got inf"),
        ({"kv_connector_extra_config": {"peers": "a:1"}}, "peers must be a list of HOST:PORT"),
        ({"kv_connector_extra_config": {"peers": ["a"]}}, "peers has 'a'; expected HOST:PORT"),
        ({"kv_connector_extra_config": {"peers": ["a:0"]}}, "peers has 'a:0'"),
        ({"kv_connector_extra_config": {"timeout_s": 0}}, "timeout_s must be a number above 0"),
        ({"kv_connector_extra_config": {"folder": "x"}}, "accepted: peers, timeout_s"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message) as error:
        KVTransferConfig.from_mapping({"kv_connector": "TCPConnector", **given})
    assert str(error.value).startswith("kv_transfer_config")


def test_addresses_are_those_of_the_field():
    def peers(**fields):
        given = {"kv_connector": "TCPConnector", **fields}
        return KVTransferConfig.from_mapping(given).peers

    asked = {"peers": ["tcp://node:1", "[::1]:2"]}
    assert peers(kv_role="kv_consumer", kv_ip="node", kv_port=5) == [("node", 5)]
    assert peers(kv_connector_extra_config=asked) == [("node", 1), ("::1", 2)]
    assert peers() == peers(kv_role="kv_producer", kv_connector_extra_config=asked) == []


def test_a_port_that_is_taken_is_an_error_at_the_start():
    with (
        connector() as one,
        pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: .*free port"),
        connector(kv_port=port_of(one)),
    ):
        pass


@pytest.mark.parametrize(("port", "ports"), [(14579, [14579, 14580]), (0, [0, 0])])
def test_each_replica_listens_on_a_port_of_its_own(port, ports):
    args = EngineArgs(
        data_parallel_size=2, kv_transfer_config={"kv_connector": "TCPConnector", "kv_port": port}
    )
    configs = replica_configs(args.create_engine_config())
    assert [config.connector.kv_transfer.kv_port for config in configs] == ports
