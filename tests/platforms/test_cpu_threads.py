"""Test the cores and threads of the CPU device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.exhaustive import exhaustive
from vllm import envs
from vllm.config import DeviceConfig, ModelConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.platforms.cpu_threads import (
    SMALL_MODEL_BYTES,
    by_topology,
    count_physical,
    count_threads,
    equal_shares,
    format_cores,
    parse_cores,
    usable_cores,
)
from vllm.platforms.numa import nodes_of
from vllm.worker.cpu import worker as cpu_worker
from vllm.worker.cpu.worker import CPUWorker
from vllm.worker.worker_base import WorkerBase

EIGHT = frozenset(range(8))


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("auto", None),
        (" ALL ", None),
        ("nobind", None),
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("0,2,4", (0, 2, 4)),
        ("6-7, 0-1", (0, 1, 6, 7)),
        ("1,1-2,2", (1, 2)),
    ],
)
def test_lists_of_cores(text, cores):
    assert parse_cores(text, EIGHT) == (None if cores is None else (cores,))
    assert parse_cores(text, EIGHT, 2) == (None if cores is None else (cores, cores))


def test_each_rank_may_have_a_list_of_its_own():
    assert parse_cores("0-1|2, 4", EIGHT, 2) == ((0, 1), (2, 4))
    message = r"='0\|1' has 2 lists of cores, and the engine has 3 workers\. Give one list for all"
    with pytest.raises(ConfigError, match=message):
        parse_cores("0|1", EIGHT, 3)
    with pytest.raises(ConfigError, match="cannot use the cores 8; usable: 0-7"):
        parse_cores("0|8", EIGHT, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected auto, all, nobind or cores such as 0-3 or 0,2,4"),
        ("0-", "expected auto"),
        ("-3", "expected auto"),
        ("0,,1", "expected auto"),
        ("0-1-2", "expected auto"),
        ("some", "expected auto"),
        ("0\u00b2", "expected auto"),
        ("3-1", "the range 3-1 ends before it begins"),
        ("6-9", "cannot use the cores 8-9; usable: 0-7"),
        ("0-99999999999", "cannot use the cores 8-"),
        ("0-3|4-7", "has 2 lists of cores, and the engine has 1 worker"),
    ],
)
def test_a_bad_list_is_named_with_what_is_wrong(text, message):
    with pytest.raises(ConfigError, match=message) as failure:
        parse_cores(text, EIGHT)
    assert str(failure.value).startswith("VLLM_CPU_OMP_THREADS_BIND=")


@pytest.mark.parametrize(
    ("cores", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((1, 3, 4), "1,3-4")]
)
def test_cores_are_written_as_ranges(cores, text):
    assert format_cores(cores) == text


def machine(folder: Path, rows: list[tuple[int, int, int, str]]) -> Path:
    """Simulate the system's view of its cores: (node, socket, physical core, hardware threads) of
    each.
    """
    for core, (node, package, physical, siblings) in enumerate(rows):
        topology = folder / "cpu" / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{physical}\n")
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
        node_folder = folder / "node" / f"node{node}"
        node_folder.mkdir(parents=True, exist_ok=True)
        cores = [number for number, row in enumerate(rows) if row[0] == node]
        (node_folder / "cpulist").write_text(f"{format_cores(set(cores))}\n")
    return folder


TWO_SOCKETS = [
    (core // 4 % 2, core // 4 % 2, core % 4, f"{core % 8},{core % 8 + 8}") for core in range(16)
]
"""Two sockets, each a node with 4 cores of 2 hardware threads, numbered as Linux does it."""


def test_nodes_and_physical_cores_are_read(tmp_path):
    system = machine(tmp_path, TWO_SOCKETS)
    assert nodes_of(range(4), system / "node") == [0]
    assert nodes_of([3, 12], system / "node") == [0, 1]
    assert nodes_of([3], tmp_path / "none") == []
    assert count_physical(range(16), system) == 8
    # A container has two hardware threads of one core.
    assert count_physical([0, 8, 1], system) == 2
    assert count_physical([0, 8, 1], tmp_path / "none") == 3


def test_ranks_get_neighbouring_cores_of_one_node(tmp_path):
    system = machine(tmp_path, TWO_SOCKETS)
    shares = equal_shares(by_topology(range(16), system), 2)
    assert [nodes_of(share, system / "node") for share in shares] == [[0], [1]]
    shares = equal_shares(by_topology(range(16), system), 8)
    assert [count_physical(share, system) for share in shares] == [1] * 8


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "weight_bytes", "runs_with_server", "want"),
    [
        (2, 2, SMALL_MODEL_BYTES - 1, True, 1),
        (2, 2, SMALL_MODEL_BYTES - 1, False, 2),
        (2, 2, SMALL_MODEL_BYTES, True, 2),
        (1, 1, 0, True, 1),
        (8, 3, 2**40, True, 3),
        (1, 8, 2**40, True, 1),
    ],
)
def test_threads_fit_the_cores_and_the_model(
    num_threads, num_cores, weight_bytes, runs_with_server, want
):
    got = count_threads(
        num_threads,
        num_cores,
        weight_bytes,
        runs_with_server=runs_with_server,
        is_pooling=False,
    )
    assert got == want


def test_a_small_model_that_pools_uses_all_cores():
    assert count_threads(2, 2, 0, runs_with_server=True, is_pooling=True) == 2


@pytest.mark.parametrize(
    ("variables", "bound", "counts"),
    [
        ({}, False, True),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, False, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "ALL"}, False, False),
        ({"OMP_NUM_THREADS": "3"}, False, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": str(min(usable_cores()))}, True, True),
    ],
)
def test_variables_arrive_in_the_config(monkeypatch, variables, bound, counts):
    loaded = envs.Envs.load(variables)
    monkeypatch.setattr(envs, "get", lambda: loaded)
    device = EngineArgs().create_engine_config().device
    assert device.bound_cores == (((min(usable_cores()),),) if bound else None)
    assert device.counts_threads is counts
    assert not device.runs_with_server


def run_worker(variables, **device):
    """Return threads and cores of a process that has loaded a model."""
    code = (
        "import dataclasses, json, os, sys\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.worker.cpu.worker import CPUWorker\n"
        "config = EngineArgs().create_engine_config()\n"
        "device = dataclasses.replace(config.device, **json.loads(sys.argv[1]))\n"
        "load = dataclasses.replace(config.load, use_tqdm_on_load=False)\n"
        "worker = CPUWorker(dataclasses.replace(config, device=device, load=load))\n"
        "worker.load(0)\n"
        "import torch\n"
        "print(json.dumps([torch.get_num_threads(), sorted(os.sched_getaffinity(0))]))"
    )
    inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", code, json.dumps(device)]
    done = subprocess.run(
        command, env=inherited | variables, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads")
@pytest.mark.parametrize(
    ("variables", "device", "num_threads", "num_cores"),
    [
        exhaustive({"OMP_NUM_THREADS": "1"}, {}, 1, None),
        exhaustive({"VLLM_CPU_OMP_THREADS_BIND": "FIRST"}, {}, 1, 1),
        ({"VLLM_CPU_OMP_THREADS_BIND": "FIRST", "OMP_NUM_THREADS": "2"}, {}, 2, 1),
        ({}, {"runs_with_server": True}, max(1, len(usable_cores()) - 1), None),
    ],
)
def test_a_worker_keeps_to_its_cores_and_threads(variables, device, num_threads, num_cores):
    usable = sorted(usable_cores())
    variables = {k: v.replace("FIRST", str(usable[0])) for k, v in variables.items()}
    threads, cores = run_worker(variables, **device)
    assert threads == num_threads
    assert cores == (usable if num_cores is None else usable[:num_cores])


def test_cores_are_sorted_by_node_and_socket_and_physical_core(tmp_path):
    # (package, core) of processors 0 to 5.
    places = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0)]
    system = machine(tmp_path, [(0, package, core, "0") for package, core in places])
    assert by_topology(range(6), system) == [0, 4, 2, 1, 5, 3]
    assert by_topology([3, 1], tmp_path / "none") == [1, 3]


NEW_MEMORY = """
import ctypes, mmap, re
from vllm.platforms.numa import interleave
try:
    print(interleave([0]), interleave([0]))
except OSError as error:
    print("refused", error)
memory = mmap.mmap(-1, 1 << 22)
memory.write(b"x" * (1 << 22))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print(re.search(rf"^{address:x} (\\S+)", open("/proc/self/numa_maps").read(), re.M)[1])
"""


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the system has no NUMA")
def test_new_memory_comes_from_the_nodes_in_turn():
    done = subprocess.run([sys.executable, "-c", NEW_MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, policy = done.stdout.splitlines()
    if first.startswith("refused"):
        pytest.skip(first)
    # A policy that is already set is not changed.
    assert (first, policy) == ("True False", "interleave:0")


def test_ranks_on_two_nodes_divide_the_cores_and_one_worker_spreads_its_memory(monkeypatch):
    affinity, spread = [], []
    cores = frozenset(range(8))
    monkeypatch.setattr(cpu_worker, "usable_cores", lambda: cores)
    monkeypatch.setattr(cpu_worker, "by_topology", sorted)
    monkeypatch.setattr(cpu_worker, "nodes_of", lambda found: [0, 1])
    monkeypatch.setattr(cpu_worker, "interleave", lambda nodes: spread.append(nodes) or True)
    monkeypatch.setattr(cpu_worker.os, "sched_setaffinity", lambda _, found: affinity.append(found))
    monkeypatch.setattr(WorkerBase, "load", lambda worker, rank: None)
    one, halves = ParallelConfig(), ParallelConfig(tensor_parallel_size=2)
    stages = ParallelConfig(pipeline_parallel_size=2, pipeline_steps_in_flight=1)
    for num_ranks, rank, parallel in ((1, 0, one), (2, 1, halves), (2, 1, stages)):
        worker = CPUWorker.__new__(CPUWorker)
        worker.config = SimpleNamespace(
            model=ModelConfig(),
            device=DeviceConfig(device="cpu", counts_threads=True),
            parallel=parallel,
        )
        worker.num_local_ranks = num_ranks
        worker.load(rank)
    assert affinity == [(4, 5, 6, 7)], "stages that take turns have all cores"
    assert spread == [[0, 1]] * 3


def test_a_container_that_forbids_memory_policies_is_told_what_else_helps(monkeypatch, caplog):
    def refuse(nodes):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(cpu_worker, "nodes_of", lambda found: [0, 1])
    monkeypatch.setattr(cpu_worker, "interleave", refuse)
    monkeypatch.setattr(WorkerBase, "load", lambda worker, rank: None)
    worker = CPUWorker.__new__(CPUWorker)
    worker.num_local_ranks = 1
    worker.config = SimpleNamespace(
        model=ModelConfig(), device=DeviceConfig(device="cpu"), parallel=ParallelConfig()
    )
    worker.load(0)
    assert "NUMA nodes 0-1: Operation not permitted. Run one rank on each" in caplog.text


def test_more_replicas_than_cores_share_them():
    assert equal_shares([3, 5], 3) == ((3,), (5,), (3,))
