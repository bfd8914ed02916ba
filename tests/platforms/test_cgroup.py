"""Test limits of control groups, of both versions, read from files as the kernel writes them."""

from pathlib import Path

import pytest

from vllm.platforms.cgroup import ControlGroups

MIB = 2**20


def groups(folder: Path, membership: str, files: dict[str, str]) -> ControlGroups:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "membership").write_text(membership)
    return ControlGroups(folder / "cgroup", folder / "membership")


V2, V2_JOB, V1 = (
    "0::/\n",
    "0::/system.slice/job_7/step_0\n",
    "4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n",
)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        (V2, {"cpu.max": "max 100000"}, None),
        (V2, {"cpu.max": "150000 100000"}, 1.5),
        (V2, {}, None),
        (V2_JOB, {"system.slice/job_7/cpu.max": "800000 100000"}, 8),
        (V2_JOB, {"system.slice/cpu.max": "4 1", "system.slice/job_7/step_0/cpu.max": "9 1"}, 4),
        # The control groups of the host are not visible in this container.
        (V2_JOB, {"cpu.max": "2 1"}, 2),
        ("0::/../../other\n", {"cpu.max": "2 1"}, 2),
        (
            V1,
            {"cpu/docker/a/cpu.cfs_quota_us": "400000", "cpu/docker/a/cpu.cfs_period_us": "100000"},
            4,
        ),
        (
            V1,
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {"cpu.max": "2 1"}, None),
    ],
)
def test_the_smallest_share_of_time_counts(tmp_path, membership, files, quota):
    assert groups(tmp_path, membership, files).cpu_quota() == quota


STAT = "anon 5\ninactive_file {}\nactive_file 7"


@pytest.mark.parametrize(
    ("membership", "files", "limit", "free"),
    [
        (V2, {"memory.max": str(300 * MIB), "memory.current": str(100 * MIB)}, 300, 200),
        (V2, {"memory.max": "max", "memory.current": str(100 * MIB)}, None, None),
        # Memory that the page cache uses for a checkpoint counts as free.
        (
            V2,
            {
                "memory.max": str(300 * MIB),
                "memory.current": str(280 * MIB),
                "memory.stat": STAT.format(200 * MIB),
            },
            300,
            220,
        ),
        (V2, {"memory.max": str(MIB), "memory.current": str(2 * MIB)}, 1, 0),
        (
            V2_JOB,
            {
                "system.slice/memory.max": str(900 * MIB),
                "system.slice/memory.current": str(800 * MIB),
                "system.slice/job_7/memory.max": str(300 * MIB),
                "system.slice/job_7/memory.current": str(50 * MIB),
            },
            300,
            100,
        ),
        (
            V1,
            {
                "memory/docker/a/memory.limit_in_bytes": str(300 * MIB),
                "memory/docker/a/memory.usage_in_bytes": str(100 * MIB),
                "memory/docker/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": str(5 * MIB),
            },
            300,
            250,
        ),
    ],
)
def test_memory_is_what_the_tightest_group_has_left(tmp_path, membership, files, limit, free):
    found = groups(tmp_path, membership, files)
    assert found.memory_limit_bytes() == (None if limit is None else limit * MIB)
    assert found.free_memory_bytes() == (None if free is None else free * MIB)


def test_the_groups_of_this_process_can_be_read():
    found = ControlGroups()
    quota, limit = found.cpu_quota(), found.memory_limit_bytes()
    assert quota is None or quota > 0
    assert limit is None or limit > 0
