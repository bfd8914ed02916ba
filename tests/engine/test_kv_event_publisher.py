"""Test the events of the KV cache that subscribers get over ZMQ: in order, and again if they missed
some.
"""

import socket
import tempfile
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.core.cache_follower import CacheFollower
from tests.reach import (
    cached_blocks_of,
    core_of,
    next_event_number_of,
    next_queued_number,
    pool_of,
    send_no_batches,
)
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, ObservabilityConfig
from vllm.config.fields import config_fields
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.kv_event_publisher import KVEventPublisher
from vllm.errors import ConfigError

END = b"\xff" * 8
STORED = BlockStored(
    block_hashes=[2**64 - 1, 7], parent_block_hash=5, token_ids=[1, 2, 3, 4], block_size=2,
    lora_id=None,
)  # fmt: skip
decode = msgspec.msgpack.Decoder(KVEventBatch).decode


@pytest.fixture
def addresses():
    """Return free addresses for events and for replays."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield {
            "endpoint": f"ipc://{Path(folder) / 'events'}",
            "replay_endpoint": f"ipc://{Path(folder) / 'replay'}",
        }


@pytest.fixture
def open_socket():
    """Open a socket of a given kind at an address; it is closed at the end of the test."""
    context, opened = zmq.Context(), []

    def open_at(kind, address):
        opened.append(context.socket(kind))
        opened[-1].setsockopt(zmq.RCVTIMEO, 60_000)
        opened[-1].connect(address)
        return opened[-1]

    yield open_at
    for each in opened:
        each.close(linger=0)
    context.term()


def make_config(addresses, **more) -> KVEventsConfig:
    fields = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv", **addresses}
    return KVEventsConfig(**{**fields, **more})


def subscribe(open_socket, addresses, publish):
    """Return a subscribed socket, after it has received something. `publish` sends it once or more
    often.
    """
    subscriber = open_socket(zmq.SUB, addresses["endpoint"])
    subscriber.subscribe(b"kv")
    # The publisher sends nothing to subscribers that it does not know yet.
    while not subscriber.poll(20):
        publish()
    return subscriber


def ask_again(open_socket, addresses, first: int) -> list[tuple[int, bytes]]:
    """Request events again; return (number, batch) of each."""
    client = open_socket(zmq.DEALER, addresses["replay_endpoint"])
    client.send_multipart((b"", first.to_bytes(8, "big")))
    batches = []
    while True:
        empty, number, data = client.recv_multipart()
        assert empty == b""
        if not data:
            assert number == END
            return batches
        batches.append((int.from_bytes(number, "big"), data))


def test_messages_have_the_form_that_subscribers_know(open_socket, addresses):
    publisher = KVEventPublisher(make_config(addresses))
    subscriber = subscribe(open_socket, addresses, lambda: publisher.publish([AllBlocksCleared()]))
    publisher.publish([STORED, BlockRemoved(block_hashes=[7])])
    publisher.close()
    publisher.close()
    last = -1
    while True:
        topic, number, data = subscriber.recv_multipart()
        assert topic == b"kv" and len(number) == 8
        number, last = int.from_bytes(number, "big"), int.from_bytes(number, "big")
        timestamp, events = msgspec.msgpack.decode(data)
        assert isinstance(timestamp, float)
        if events != [["AllBlocksCleared"]]:
            break
    assert number == last > 0
    assert events == [
        ["BlockStored", [2**64 - 1, 7], 5, [1, 2, 3, 4], 2, None, None, None, None],
        ["BlockRemoved", [7]],
    ]
    assert decode(data).events == [STORED, BlockRemoved(block_hashes=[7])]


def test_a_replay_has_what_is_kept_from_a_number_on(open_socket, addresses):
    publisher = KVEventPublisher(make_config(addresses, buffer_steps=3))
    numbers = iter(range(1000))

    def publish():
        publisher.publish([BlockRemoved(block_hashes=[next(numbers)])])

    for _ in range(5):
        publish()
    subscriber = subscribe(open_socket, addresses, publish)
    last = next(numbers) - 1
    while int.from_bytes(subscriber.recv_multipart()[1], "big") < last:
        pass  # another thread keeps an event before it sends it: what was received here is kept
    kept = ask_again(open_socket, addresses, 0)
    assert len(kept) == 3 and [number for number, _ in kept] == sorted(n for n, _ in kept)
    newest = kept[-1][0]
    assert ask_again(open_socket, addresses, newest) == kept[-1:]
    assert ask_again(open_socket, addresses, newest + 1) == []
    # The publisher answers only valid questions; other messages do no harm.
    client = open_socket(zmq.DEALER, addresses["replay_endpoint"])
    for frames in ([b""], [b"", b"x"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", bytes(9)]):
        client.send_multipart(frames)
    assert ask_again(open_socket, addresses, 0) == kept
    publisher.close()


def test_a_full_queue_drops_batches_and_their_numbers_show_it(open_socket, addresses, monkeypatch):
    send_no_batches(monkeypatch)
    publisher = KVEventPublisher(make_config(addresses, max_queue_size=2))
    for _ in range(5):
        publisher.publish([AllBlocksCleared()])
    waiting = [next_queued_number(publisher) for _ in range(2)]
    publisher.publish([AllBlocksCleared()])
    assert [*waiting, next_queued_number(publisher)] == [0, 1, 5]
    publisher.close()


def test_an_engine_tells_all_that_its_cache_holds(open_socket, addresses):
    config = make_config(addresses)
    llm = LLM(
        max_model_len=128, num_gpu_blocks_override=20, max_num_seqs=4, kv_events_config=config
    )
    assert next_event_number_of(llm) == 1
    subscriber = subscribe(open_socket, addresses, llm.reset_prefix_cache)
    pool = pool_of(llm)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for start in range(0, 40, 10):
        prompts = [[start + i] * (16 * i + 5) for i in range(1, 5)]
        llm.generate([*prompts, prompts[0]], params, use_tqdm=False)
    assert len(cached_blocks_of(pool)) > 10

    # A subscriber that followed an earlier engine at this address has to drop the blocks of that
    # engine.
    assert decode(ask_again(open_socket, addresses, 0)[0][1]).events == [AllBlocksCleared()]
    core = core_of(llm)
    core.shutdown()
    last = next_event_number_of(core) - 1
    known, number, numbers = CacheFollower(), -1, []
    while number != last:
        _, frame, data = subscriber.recv_multipart()
        number = int.from_bytes(frame, "big")
        numbers.append(number)
        known.follow(decode(data).events)
    assert numbers == list(range(numbers[0], last + 1))
    known.check(pool)
    sizes = {len(tokens) for _, tokens in known.blocks.values()}
    assert sizes == {16}
    parents = {parent for parent, _ in known.blocks.values()} - {None}
    assert parents & known.blocks.keys()


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://*:{taken.getsockname()[1]}"
        config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        for name in ("endpoint", "replay_endpoint"):
            other = {"endpoint": "inproc://x"} if name != "endpoint" else {}
            with pytest.raises(ConfigError, match=f"kv_events_config: {name} '.*' cannot be used"):
                LLM(load_format="dummy", kv_events_config={**config, **other, name: endpoint})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"topics": "x"},
            "kv_events_config has the unknown key 'topics'; accepted: enable_kv_cache_events",
        ),
        ({"publisher": "kafka"}, "kv_events_config: publisher must be one of null, zmq"),
        ({"endpoint": "localhost:5557"}, "endpoint must begin with tcp://, ipc:// or inproc://"),
        ({"replay_endpoint": 5558}, "replay_endpoint must begin with"),
        ({"buffer_steps": -1}, "buffer_steps must be an integer of at least 0, got -1"),
        ({"hwm": "x"}, "hwm must be an integer"),
        ({"max_queue_size": 0}, "max_queue_size must be an integer of at least 1"),
        ({"topic": 5}, "topic must be of the type str"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events must be of the type bool"),
    ],
)
def test_a_wrong_config_is_refused_by_name(value, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(kv_events_config=value).create_engine_config()


def test_the_config_may_be_given_as_a_mapping_as_text_or_as_an_object():
    (field,) = [f for f in config_fields(ObservabilityConfig) if f.name == "kv_events_config"]
    for value in ({"topic": "x"}, '{"topic": "x"}', KVEventsConfig(topic="x")):
        converted = field.convert(value)
        assert ObservabilityConfig(kv_events_config=converted).kv_events == KVEventsConfig(
            topic="x"
        )
    assert not ObservabilityConfig().kv_events.is_published
    assert not KVEventsConfig(enable_kv_cache_events=True).is_published


def test_events_need_the_prefix_cache():
    enabled = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError, match="needs the prefix cache, which is off"):
        EngineArgs(kv_events_config=enabled, enable_prefix_caching=False).create_engine_config()
