"""Cores and threads of the CPU device."""

import json
import os
import subprocess
import sys

import pytest

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.platforms import cpu_threads
from vllm.platforms.cpu_threads import (
    SMALL_MODEL_BYTES,
    by_place,
    count_threads,
    equal_shares,
    format_cores,
    parse_cores,
    quota_cores,
    usable_cores,
)

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


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        (None, None),
    ],
)
def test_the_share_of_a_container_counts(tmp_path, monkeypatch, content, cores):
    monkeypatch.setattr(cpu_threads, "_CPU_MAX", tmp_path / "cpu.max")
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert quota_cores() == cores


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "weight_bytes", "is_beside_server", "want"),
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
    num_threads, num_cores, weight_bytes, is_beside_server, want
):
    assert (
        count_threads(num_threads, num_cores, weight_bytes, is_beside_server=is_beside_server)
        == want
    )


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
    assert not device.is_beside_server


def run_worker(variables, **device):
    """Threads and cores of a process that has loaded a model."""
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
        ({"OMP_NUM_THREADS": "1"}, {}, 1, None),
        ({"VLLM_CPU_OMP_THREADS_BIND": "FIRST"}, {}, 1, 1),
        ({"VLLM_CPU_OMP_THREADS_BIND": "FIRST", "OMP_NUM_THREADS": "2"}, {}, 2, 1),
        ({}, {"is_beside_server": True}, max(1, len(usable_cores()) - 1), None),
    ],
)
def test_a_worker_keeps_to_its_cores_and_threads(variables, device, num_threads, num_cores):
    usable = sorted(usable_cores())
    variables = {k: v.replace("FIRST", str(usable[0])) for k, v in variables.items()}
    threads, cores = run_worker(variables, **device)
    assert threads == num_threads
    assert cores == (usable if num_cores is None else usable[:num_cores])


def test_cores_are_sorted_by_socket_and_physical_core(tmp_path):
    places = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0)]  # of cores 0 to 5
    for core, (package, physical) in enumerate(places):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{physical}\n")
    assert by_place(range(6), tmp_path) == [0, 4, 2, 1, 5, 3]
    assert by_place([3, 1], tmp_path / "none") == [1, 3]


def test_more_replicas_than_cores_share_them():
    assert equal_shares([3, 5], 3) == ((3,), (5,), (3,))
