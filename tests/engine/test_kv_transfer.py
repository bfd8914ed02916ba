"""Test KV blocks outside of the KV cache: damaged files, bounded memory, and loading them."""

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from tests.engine.test_engine_core import FakeExecutor
from tests.engine.test_replica_router import make_request
from tests.exhaustive import seeds
from vllm.config import ConnectorConfig, KVTransferConfig
from vllm.core.kv.block_hash import block_hashes
from vllm.core.kv.cache_events import CacheEventLog
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.request_queue import RequestQueue
from vllm.distributed.kv_transfer import KVConnector, block_folder, tiers
from vllm.distributed.kv_transfer.block_folder import BlockFolder
from vllm.distributed.kv_transfer.block_format import compose
from vllm.distributed.kv_transfer.choose import make_connector
from vllm.distributed.kv_transfer.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.tiers import TieredConnector
from vllm.engine import engine_core
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.engine_core import EngineCore
from vllm.errors import ConfigError
from vllm.messages import BlockStored
from vllm.request import Request

KEYS = [bytes([number]) * 32 for number in range(40)]
BLOCK = [b"first rank" * 10, b"second"]


class OwnConnector(TieredConnector):
    """A connector class of a user."""


def make_folder(path, max_bytes=1 << 20):
    folder = BlockFolder(str(path), max_bytes)
    folder.open("model")
    return folder


def file_of(path, key):
    (found,) = path.glob(f"*/*/{key.hex()}.kv")
    return found


# ---- files ---------------------------------------------------------------------------------


def test_a_block_is_read_as_it_was_written(tmp_path):
    folder = make_folder(tmp_path)
    assert folder.read(KEYS[0]) is None and not folder.has(KEYS[0])
    folder.write(KEYS[0], BLOCK)
    folder.write(KEYS[1], [b""])
    assert make_folder(tmp_path).read(KEYS[0]) == BLOCK and folder.read(KEYS[1]) == [b""]
    folder.open("another model")
    assert folder.read(KEYS[0]) is None
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("seed", seeds(15, 40))
def test_a_damaged_file_is_a_missing_block(tmp_path, seed):
    rng, folder = random.Random(seed), make_folder(tmp_path)
    folder.write(KEYS[0], BLOCK)
    path = file_of(tmp_path, KEYS[0])
    data = bytearray(path.read_bytes())
    kind = seed % 4
    if kind == 0:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data += bytes(rng.randrange(1, 9))
    else:
        folder.write(KEYS[1], BLOCK)
        data = file_of(tmp_path, KEYS[1]).read_bytes()  # a whole file, but of another key
    path.write_bytes(data)
    assert folder.read(KEYS[0]) is None
    assert not path.exists()


def test_the_folder_stays_within_its_size_and_keeps_what_is_used(tmp_path):
    folder = make_folder(tmp_path, max_bytes=20_000)
    block = [bytes(1000)]
    for number, key in enumerate(KEYS[:15]):
        folder.write(key, block)
        os.utime(file_of(tmp_path, key), (number, number))
    assert folder.read(KEYS[0]) == block  # now this block is the most recently used
    for key in KEYS[15:28]:
        folder.write(key, block)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.kv")]
    assert 10_000 < sum(sizes) <= 21_200
    assert folder.has(KEYS[0]) and folder.has(KEYS[27])
    assert not any(folder.has(key) for key in KEYS[1:10])


def test_a_full_disk_drops_blocks_and_says_so_once(tmp_path, monkeypatch, capsys):
    folder = make_folder(tmp_path)
    (tmp_path / "model").write_text("a file where the folder should be")
    for key in KEYS[:3]:
        folder.write(key, BLOCK)
    assert capsys.readouterr().err.count("could not be written") == 1
    assert folder.read(KEYS[0]) is None


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the folder '.*file/x' cannot be written: "):
        BlockFolder(str(tmp_path / "file" / "x"), 1)


def test_other_files_below_the_folder_are_left_alone(tmp_path):
    others = [tmp_path / "a.kv", tmp_path / "b.tmp", tmp_path / "model" / "ab" / "data.kv"]
    others += [tmp_path / "work" / "deep" / "ab" / f"{KEYS[0].hex()}.kv"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100_000))
        os.utime(path, (0, 0))
    folder = make_folder(tmp_path, max_bytes=5_000)
    for key in KEYS[:15]:
        folder.write(key, [bytes(1000)])
    assert all(path.exists() for path in others)
    assert 2 <= sum(map(folder.has, KEYS)) <= 5


def test_leftovers_and_files_of_a_wrong_clock_are_removed_first(tmp_path, monkeypatch):
    def with_limit(max_bytes):
        folder = BlockFolder(str(tmp_path), max_bytes, clock=lambda: 100_000.0)
        folder.open("model")
        return folder

    folder = with_limit(20_000)
    for number, key in enumerate(KEYS[:12]):
        folder.write(key, [bytes(1000)])
        os.utime(file_of(tmp_path, key), (number, 900_000 if number > 9 else 50_000))
    subfolder = file_of(tmp_path, KEYS[0]).parent
    old, new = (subfolder / f".{each * 16}-1.tmp" for each in "ab")
    for path, used_at in ((old, 90_000), (new, 99_000)):
        path.write_bytes(bytes(10))
        os.utime(path, (used_at, used_at))
    folder.remove_oldest()
    assert new.exists() and not old.exists() and sum(map(folder.has, KEYS)) == 12
    with_limit(12_000).remove_oldest()
    assert [number for number in range(12) if not folder.has(KEYS[number])][-2:] == [10, 11]
    # Files that cannot be deleted are not counted as deleted.
    unlink, kept = os.unlink, [file_of(tmp_path, key) for key in KEYS if folder.has(key)]

    def refuse(path):
        if os.fspath(path) == str(kept[0]):
            raise PermissionError
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    with_limit(2_000).remove_oldest()
    assert [path for path in kept if path.exists()] == kept[:1]


def test_engines_that_write_the_same_block_at_the_same_time_do_not_disturb_each_other(
    tmp_path, monkeypatch, capsys
):
    one, other = make_folder(tmp_path), make_folder(tmp_path)

    def interrupted(key, block):
        monkeypatch.undo()
        head, *rest = compose(key, block)
        yield head
        other.write(key, block)
        yield from rest

    monkeypatch.setattr(block_folder, "compose", interrupted)
    one.write(KEYS[0], BLOCK)
    assert one.read(KEYS[0]) == other.read(KEYS[0]) == BLOCK
    assert not list(tmp_path.rglob("*.tmp")) and not capsys.readouterr().err


def test_a_folder_that_can_only_be_read_serves_an_engine_that_only_reads(tmp_path, monkeypatch):
    make_folder(tmp_path).write(KEYS[0], BLOCK)

    def refuse(*_args, **_options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "touch", refuse)
    folder = BlockFolder(str(tmp_path), 1 << 20, saves=False)
    folder.open("model")
    assert folder.read(KEYS[0]) == BLOCK
    with pytest.raises(ConfigError, match="cannot be written: Read-only file system"):
        make_folder(tmp_path)


@pytest.mark.parametrize(
    ("mode", "owner", "text"),
    [(0o777, 0, "every user of this machine can write"), (0o700, 1, "belongs to user")],
)
def test_a_folder_that_others_can_write_is_told(mode, owner, text, tmp_path, monkeypatch, capsys):
    tmp_path.chmod(mode)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + owner)
    make_folder(tmp_path)
    assert text in capsys.readouterr().err


# ---- only host memory, and host memory with files ------------------------------------------------


def test_host_memory_is_bounded_and_drops_the_least_recently_used():
    host = HostBlocks(max_bytes=300)
    for key in KEYS[:3]:
        host.put(key, [bytes(60), bytes(40)])
    assert host.get(KEYS[0]) is not None
    host.put(KEYS[3], [bytes(100)])
    assert [key in host for key in KEYS[:4]] == [True, False, True, True]
    host.put(KEYS[3], [bytes(10)])
    assert host.num_bytes == 210
    host.put(KEYS[4], [bytes(301)])
    assert KEYS[4] not in host and host.num_bytes <= 300
    host.clear()
    assert (len(host), host.num_bytes) == (0, 0)


def make_tiers(path, **fields):
    extra = {} if path is None else {"folder": str(path)}
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra, **fields}
    connector = make_connector(KVTransferConfig.from_mapping(config))
    connector.open("model")
    return connector


def test_blocks_are_kept_in_host_memory_alone():
    connector = make_tiers(None)
    assert connector.missing(KEYS[:2]) == [0, 1]
    connector.save(KEYS[:2], [BLOCK, BLOCK])
    assert connector.load([KEYS[0], KEYS[1], KEYS[2], KEYS[0]]) == [BLOCK, BLOCK]
    assert connector.missing(KEYS[:3]) == [2] and connector.prefetch(KEYS[:3]) is None
    connector.drop([KEYS[0]])
    assert connector.load(KEYS[:2]) == []
    connector.open("other weights")
    assert connector.load(KEYS[1:2]) == []
    connector.close()


class Lazy:
    """An executor that runs its steps in order, each when its result is requested."""

    def __init__(self):
        self.calls = []

    def submit(self, *call):
        self.calls.append(call)
        return self

    def result(self):
        while self.calls:
            function, *args = self.calls.pop(0)
            function(*args)

    shutdown = result


def test_what_is_read_while_the_weights_change_is_not_taken_for_blocks_of_the_new_ones(
    tmp_path, monkeypatch
):
    make_folder(tmp_path).write(KEYS[0], BLOCK)
    monkeypatch.setattr(tiers, "ThreadPoolExecutor", lambda *_: Lazy())
    connector = make_tiers(tmp_path)
    assert connector.prefetch(KEYS[:1]) is not None
    connector.open("other weights")
    assert connector.load(KEYS[:1]) == []
    connector.close()


def test_files_come_back_after_a_restart(tmp_path):
    connector = make_tiers(tmp_path)
    connector.save(KEYS[:4], [BLOCK] * 4)
    connector.close()  # waits until the files are written
    connector = make_tiers(tmp_path)
    connector.prefetch(KEYS[:5]).result()
    for key in KEYS[:4]:
        file_of(tmp_path, key).unlink()
    # These blocks are in host memory now, so their files are not needed.
    assert connector.load(KEYS[:5]) == [BLOCK] * 4
    connector.save(KEYS[:1], [BLOCK])
    connector.drop(KEYS[:4])
    assert connector.load(KEYS[:1]) == [] and not list(tmp_path.rglob("*.kv"))
    connector.close()


def test_what_a_producer_saves_is_told_when_it_is_in_the_folder(tmp_path):
    connector = make_tiers(tmp_path, kv_role="kv_producer")
    connector.save(KEYS[:4], [BLOCK] * 4).result()
    assert len(list(tmp_path.rglob("*.kv"))) == 4
    connector.close()
    both = make_tiers(tmp_path)
    assert both.save(KEYS[4:5], [BLOCK]) is None  # requests do not wait until this block is written
    both.close()


def test_a_producer_waits_for_a_slow_folder_and_loses_no_block(tmp_path, monkeypatch):
    connector = make_tiers(tmp_path, kv_role="kv_producer", kv_buffer_size=200)
    written = [connector.save([key], [BLOCK]) for key in KEYS]
    assert all(each.done() for each in written[:-2])
    connector.close()
    assert len(list(tmp_path.rglob("*.kv"))) == len(KEYS)


def test_a_slow_folder_does_not_collect_blocks_in_memory(tmp_path, monkeypatch):
    go, write = threading.Event(), BlockFolder.write
    monkeypatch.setattr(BlockFolder, "write", lambda *args: (go.wait(60), write(*args)))
    connector = make_tiers(tmp_path, kv_buffer_size=200)
    for key in KEYS:
        connector.save([key], [BLOCK])
    go.set()
    connector.close()
    assert len(list(tmp_path.rglob("*.kv"))) == 2


# ---- loading blocks into the cache ---------------------------------------------------------------


def test_contents_are_restored_into_free_blocks():
    events = CacheEventLog(4)
    cache = KVCacheManager(9, 4, True, events)
    tokens = list(range(20))
    hashes = block_hashes(b"root", tokens, 4)
    elsewhere = {key: index for index, key in enumerate(hashes[:4])}
    written = {}

    def load(keys):
        found = [elsewhere.get(key) for key in keys]
        return found[: found.index(None)] if None in found else found

    def write(block_ids, contents):
        written.update(zip(block_ids, contents, strict=True))
        return True

    assert cache.restore(hashes, tokens, load, write) == 4
    found = cache.pool.find(hashes)
    assert [written[block_id] for block_id in found] == [0, 1, 2, 3]
    assert cache.pool.num_free == 8
    (event,) = events.drain()
    assert isinstance(event, BlockStored) and event.token_ids == tokens[:16]
    assert cache.restore(hashes, tokens, load, write) == 0
    # When a prefix is in the cache, only the rest is loaded, and the prefix is not evicted for it.
    cache.pool.uncache_blocks(hashes[2:])
    held = cache.pool.allocate(5)
    assert cache.pool.num_free == 3
    assert cache.restore(hashes, tokens, load, write) == 1
    assert cache.pool.find(hashes)[:2] == found[:2]
    cache.pool.free(held)


@pytest.mark.parametrize("failure", ["refused", "raised"])
def test_a_block_that_is_not_written_is_not_found(failure):
    cache = KVCacheManager(9, 4, True)
    hashes = block_hashes(b"root", range(8), 4)

    def write(block_ids, contents):
        if failure == "raised":
            raise RuntimeError
        return False

    if failure == "raised":
        with pytest.raises(RuntimeError):
            cache.restore(hashes, range(8), lambda keys: [1, 2], write)
    else:
        assert cache.restore(hashes, range(8), lambda keys: [1, 2], write) == 0
    assert cache.pool.find(hashes) == [] and cache.pool.num_free == 8


def test_blocks_of_requests_that_leave_are_noted_and_wrong_ones_are_not():
    cache = KVCacheManager(20, 4, True)
    cache.freed = []
    requests = [Request(make_request([number] * 10), (number,)) for number in range(2)]
    tables = []
    for request in requests:
        cache.admit(request, [])
        cache.cache_blocks(request, 10)
        tables.append(request.block_ids[:2])
        cache.free(request)
    assert [block_id for block_id, _ in cache.freed] == [*tables[0], *tables[1]]
    cache.uncache_blocks(requests[0])
    assert cache.freed == list(zip(tables[1], requests[1].block_hashes, strict=True))
    assert cache.forgotten == requests[0].block_hashes


def test_a_queue_tells_who_is_next_in_order():
    queue, numbers = RequestQueue(), list(range(20))
    assert not list(queue.in_order())
    requests = [Request(make_request([number]), (number,)) for number in numbers]
    for number in random.Random(1).sample(numbers, len(numbers)):
        queue.push(requests[number])
    for number in (0, 7, 13):
        queue.discard(requests[number])
        numbers.remove(number)
    assert [request.sort_key for request in queue.in_order()] == [(each,) for each in numbers]


# ---- settings ------------------------------------------------------------------------------

SHARED = "SharedStorageConnector"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_role": "kv_both"}, "needs kv_connector; accepted: OffloadingConnector .* Shared"),
        ({"kv_connector": "NixlConnector"}, "kv_connector must be one of .* 'NixlConnector'"),
        ({"kv_connector": SHARED}, "needs a folder: .*shared_storage_path"),
        (
            {"kv_connector": SHARED, "role": 1},
            "has the unknown key 'role'; accepted: kv_connector, kv_role",
        ),
        (
            {"kv_connector": SHARED, "kv_connector_extra_config": {"folder": "x"}},
            "has the unknown key 'folder'; accepted: shared_storage_path, folder_bytes",
        ),
        (
            {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"folder_bytes": 0},
            },
            "folder_bytes must be an integer of at least 1, got 0",
        ),
        ({"kv_connector": "OffloadingConnector", "kv_role": "both"}, "kv_role must be one of"),
        (
            {"kv_connector": "OffloadingConnector", "kv_buffer_size": "1"},
            "number of bytes, got '1'",
        ),
        ({"kv_connector": SHARED, "kv_buffer_size": float("inf")}, "number of bytes, got inf"),
        ({"kv_connector": "OffloadingConnector", "kv_buffer_device": "cuda"}, "must be .*cpu"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message) as error:
        EngineArgs(kv_transfer_config=given).create_engine_config()
    assert str(error.value).startswith("kv_transfer_config")


def test_it_needs_the_prefix_cache():
    args = EngineArgs(
        kv_transfer_config={"kv_connector": "OffloadingConnector"}, enable_prefix_caching=False
    )
    with pytest.raises(ConfigError, match="kv_transfer_config needs the prefix cache"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("name", "message"),
    [("OwnConnector", None), ("KEYS", "must name a class"), ("KVTransferConfig", "not a subclass")],
)
def test_a_user_may_bring_a_connector(name, message):
    config = KVTransferConfig.from_mapping(
        {"kv_connector": name, "kv_connector_module_path": __name__}
    )
    if message is None:
        connector = make_connector(config)
        assert isinstance(connector, KVConnector) and type(connector).__name__ == name
        connector.close()
    else:
        with pytest.raises(ConfigError, match=message):
            make_connector(config)


OFFLOAD = ConnectorConfig(kv_transfer_config={"kv_connector": "OffloadingConnector"})


class WindowedExecutor(FakeExecutor):
    """Has workers whose model has sliding windows."""

    def start(self):
        num_blocks = super().start()
        self.cache_windows = (None, 64)
        return num_blocks


def test_it_is_refused_for_a_model_with_windows_whose_workers_are_shut_down(monkeypatch):
    connector, executor, ended = make_tiers(None), WindowedExecutor(), []
    monkeypatch.setattr(engine_core, "make_connector", lambda config: connector)
    monkeypatch.setattr(executor, "shutdown", lambda: ended.append("workers"))
    monkeypatch.setattr(connector, "close", lambda: ended.append("connector"))
    config = EngineArgs(kv_transfer_config={"kv_connector": "OffloadingConnector"})
    with pytest.raises(ConfigError, match="sliding-window"):
        EngineCore(config.create_engine_config(), executor)
    assert ended == ["workers", "connector"]
