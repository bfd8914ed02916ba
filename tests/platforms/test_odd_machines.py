"""Test what the engine says on machines where a part of the Gaudi software is missing, replaced,
of another release, or in use: one line, at the start.
"""

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hpu import captured_log
from tests.loops import loop_over
from tests.platforms.test_hpu_platform import raising
from tests.reach import use_machine
from vllm.entrypoints.cli.main import main
from vllm.env import interfaces
from vllm.env.interfaces import check_interfaces
from vllm.errors import ConfigError
from vllm.platforms import hpu, registry
from vllm.platforms.habana import host, nodes, versions
from vllm.platforms.habana.host import HostSettings
from vllm.platforms.habana.versions import Installed
from vllm.platforms.hpu import create_hpu_platform
from vllm.platforms.registry import detect_device

IMAGE = "docker run --runtime=habana -e HABANA_VISIBLE_DEVICES=all"


@pytest.fixture
def resolved_anew() -> Iterator[None]:
    """Resolve the platform in this test without the result of others, and the other way round."""
    registry.resolve_platform.cache_clear()
    yield
    registry.resolve_platform.cache_clear()


@pytest.fixture
def machine(tmp_path, monkeypatch, vendor) -> Path:
    """A machine with one card of release 1.21.3, as files; its bridge is the stand-in."""
    root = tmp_path / "machine"
    for path in ("dev/accel/accel0", "sys/class/accel/accel0/device/module_id", "driver"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("0\n")
    (root / "driver").write_text("1.21.3-57e6a7b\n")
    use_machine(monkeypatch, root)
    for name in ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return root


def refusal() -> str:
    """Return the error of an engine that needs a card."""
    with pytest.raises(ConfigError) as failure:
        _ = create_hpu_platform().bridge
    assert "\n" not in str(failure.value)
    return str(failure.value)


# ---- no card -------------------------------------------------------------------------------------


@loop_over(
    "devices, paths, said",
    [
        (None, (), "no card, no driver, or a container without --runtime=habana"),
        ("all", (), "no card, no driver, or a container without --runtime=habana"),
        ("none", (), "HABANA_VISIBLE_DEVICES=none hides the cards from this container"),
        ("VOID", (), "HABANA_VISIBLE_DEVICES=VOID hides the cards from this container"),
        (
            None,
            ("class/accel/accel0/device", "class/accel/accel1/device"),
            f"the driver has 2 Gaudi cards, but this container has no node of a card. Create it "
            f"with `{IMAGE}`",
        ),
        (
            "8, 9",
            ("class/accel/accel0/device",),
            "HABANA_VISIBLE_DEVICES=8, 9 names none of the 1 ",
        ),
        ("0", ("class/accel/accel0/device",), "this container has no node of a card"),
        ("0-3", (), "HABANA_VISIBLE_DEVICES=0-3 is neither `all` nor a list of indices of cards"),
        (None, ("bus/pci/0000:33:00.0",), "the PCI bus has 1 Gaudi card, but no driver uses them"),
    ],
)
def test_a_machine_without_nodes_says_where_its_cards_are(
    environment, vendor, monkeypatch, tmp_path_factory, devices, paths, said
):
    root = tmp_path_factory.mktemp("machine")
    use_machine(monkeypatch, root)
    environment()
    for path in paths:
        (root / "sys" / path).mkdir(parents=True)
        (root / "sys" / path / "vendor").write_text("0x1da3\n")
    monkeypatch.setenv("HABANA_VISIBLE_DEVICES", devices or "")
    assert re.search(r"no usable Gaudi card: there is no Gaudi among .*" + said, refusal())
    with captured_log() as log:
        assert detect_device() == "cpu"
    assert any(said in line for line in log)


def test_nodes_that_the_user_may_not_open_are_an_error(environment, machine, monkeypatch):
    environment()
    monkeypatch.setattr(nodes.os, "access", lambda path, mode: False)
    (machine / "dev/accel/accel0").chmod(0o660)
    group = (machine / "dev/accel/accel0").stat().st_gid
    text = refusal()
    assert f"this process has user {os.geteuid()} and groups " in text
    assert f"group {group} and mode 660. Add the user to that group (`docker run --group-" in text


# ---- versions ------------------------------------------------------------------------------------

OLD_TORCH = "habana-torch-plugin 1.21.3.57 was built for torch 2.6.0, but torch 2.9.1 is installed"
STOCK = "PT_HPU_LAZY_MODE=1 needs a torch that the vendor has built"


@loop_over(
    "installed, is_lazy, refused, mismatch",
    [
        (Installed("2.6.0a0+git74cd574", "1.21.3.57", "2.6.0", "1.21.3-57"), True, None, None),
        (Installed("2.6.0+hpu.1.21.3", "1.21.3.57", "2.6.0a0", "1.21.0-1"), True, None, None),
        (Installed("2.11.0", "1.24.1.12", "2.11.0", "1.24.1-9"), False, None, None),
        (Installed("2.11.0", "1.24.1.12", "2.11.0", "1.24.1-9"), True, STOCK, None),
        (Installed("2.9.1", "1.21.3.57", "2.6.0", "1.21.3-57"), False, OLD_TORCH, None),
        (Installed("2.9.1", None, "2.6.0"), True, "habana-torch-plugin of an unknown ver", None),
        (
            Installed("2.6.0+hpu", "1.21.3.57", "2.6.0", "1.20.1-97ee"),
            True,
            None,
            "the driver is of release 1.20.1, and habana-torch-plugin of 1.21.3. If the card",
        ),
        (Installed("2.13.0+cpu"), True, None, None),  # nothing is known
        (Installed("2.6.0+hpu", "1.21.3.57", "odd", "odd"), True, "built for torch odd", "of odd"),
    ],
)
def test_versions_that_do_not_fit_are_named(installed, is_lazy, refused, mismatch):
    for found, expected in (
        (installed.why_not_loadable(is_lazy=is_lazy), refused),
        (installed.driver_mismatch(), mismatch),
    ):
        assert (found is None) == (expected is None)
        assert (expected or "") in (found or "")


def test_the_version_that_the_bridge_was_built_for_is_read_from_its_folder(
    vendor, monkeypatch, tmp_path
):
    assert versions.find_installed().built_for is None
    spec = importlib.import_module("habana_frameworks.torch").__spec__
    monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
    (tmp_path / "required_version.txt").write_text("2.6.0a0\n")
    assert versions.find_installed().built_for == "2.6.0a0"


def test_a_torch_of_another_build_is_refused_before_the_bridge_is_loaded(
    environment, machine, vendor, monkeypatch
):
    environment(PT_HPU_LAZY_MODE="1")
    stock = Installed("2.9.1", "1.21.3.57", "2.6.0")
    monkeypatch.setattr(versions, "find_installed", lambda: stock)
    assert refusal().startswith(
        f"the Habana bridge (habana_frameworks) cannot be loaded: {OLD_TORCH}. Probably pip has "
        f"replaced the torch of the image: start again from the vendor's image"
    )
    assert vendor.calls == []


@loop_over(
    "error, advice",
    [
        (AttributeError("'NoneType' object has no attribute 'startswith'"), "if pip has replaced"),
        (
            OSError("libSynapse.so: cannot open shared object file: No such file or directory"),
            "add this folder to LD_LIBRARY_PATH (`source /etc/profile.d/habanalabs.sh`)",
        ),
    ],
)
def test_an_import_that_fails_says_what_was_found(
    environment, machine, monkeypatch, capsys, error, advice
):
    environment()
    monkeypatch.setattr("vllm.platforms.habana.real.find_parts", raising(error))
    text = refusal()
    assert f"cannot be loaded: {error}. Found: torch " in text and advice in text
    assert ", driver 1.21.3-57e6a7b. " in text


def test_collect_env_reports_a_machine_whose_bridge_cannot_be_loaded(
    environment, machine, resolved_anew, monkeypatch, capsys
):
    environment()
    monkeypatch.setattr(hpu, "has_vendor_library", lambda: True)
    wrong = AssertionError("Error: Compile-time PyTorch version 2.6.0 differs from run-time 2.9.1.")
    monkeypatch.setattr("vllm.platforms.habana.parts.load_vendor", raising(wrong))
    stock = Installed("2.9.1", "1.21.3.57", "2.6.0", "1.20.1-97ee")
    monkeypatch.setattr(versions, "find_installed", lambda: stock)
    assert main(["collect-env"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Gaudi driver: 1.20.1-97ee" in lines
    assert "Gaudi cards: 1 (modules 0)" in lines
    assert any(line.startswith("Gaudi host: Linux ") for line in lines)
    problems = [line.partition(": ")[2] for line in lines if line.startswith("Gaudi problem")]
    assert [problem.split(",")[0] for problem in problems] == [
        "habana-torch-plugin 1.21.3.57 was built for torch 2.6.0",
        "the driver is of release 1.20.1",
    ]
    assert f"Gaudi kernels: habana_frameworks cannot be loaded: {wrong}" in lines


# ---- settings of the host ------------------------------------------------------------------------

GUIDES = {
    "kernel": "6.8.0-45-generic",
    "iommu": "identity",
    "num_huge_pages": 15000,
    "governor": "performance",
    "balances_numa": False,
    "shared_memory_bytes": 2**34,
}
"""Settings as the vendor's guides ask for them."""


@loop_over(
    "changes, num_ranks, problem, advice",
    [
        ({}, 8, None, None),
        (dict.fromkeys(("iommu", "num_huge_pages", "governor", "balances_numa")), 8, None, None),
        ({"shared_memory_bytes": None}, 8, None, None),
        ({"iommu": "DMA-FQ"}, 1, "the IOMMU translates the addresses of the cards (DMA-FQ)", None),
        ({"iommu": "DMA, identity"}, 1, "add `iommu=pt intel_iommu=on` to the command line", None),
        ({"iommu": "DMA-FQ", "kernel": "5.15.0-100-generic"}, 1, None, None),
        ({"shared_memory_bytes": 2**26}, 2, "has only 64 MiB, and libraries for several", None),
        ({"shared_memory_bytes": 2**26}, 1, None, None),
        ({"num_huge_pages": 0}, 1, None, "`sysctl -w vm.nr_hugepages=15000`"),
        ({"governor": "powersave"}, 1, None, "the frequency governor of the processor is power"),
        ({"balances_numa": True}, 1, None, "`sysctl -w kernel.numa_balancing=0`"),
    ],
)
def test_settings_of_the_host_that_slow_cards_down_are_named(changes, num_ranks, problem, advice):
    settings = HostSettings(**GUIDES | changes)
    for found, wanted in ((settings.problems(num_ranks), problem), (settings.advice(), advice)):
        assert len(found) == (wanted is not None)
        assert (wanted or "") in "".join(found)


def test_settings_of_the_host_are_read_and_a_start_warns_of_them(environment, machine, monkeypatch):
    environment()
    group = machine / "sys/class/accel/accel0/device/iommu_group"
    group.mkdir()
    (group / "type").write_text("DMA-FQ\n")
    (machine / "proc").mkdir()
    (machine / "proc/meminfo").write_text("MemTotal: 12 kB\nHugePages_Total:      12\n")
    (machine / "proc/numa_balancing").write_text("1\n")
    (machine / "sys/governor").write_text("powersave\n")
    kernel = type(os.uname())(("Linux", "host", "6.8.0-45-generic", "", "x86_64"))
    monkeypatch.setattr(host.os, "uname", lambda: kernel)
    assert str(host.read_host()) == (
        "Linux 6.8.0-45-generic, IOMMU DMA-FQ, 12 huge pages, frequency governor powersave, NUMA "
        "balancing on"
    )
    for rank, is_warned in (("", True), ("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with captured_log() as log:
            _ = create_hpu_platform().bridge
        said = "this machine is not set up for Gaudi: the IOMMU translates the addresses"
        assert any(line.startswith(said) for line in log) == is_warned


# ---- cards in use --------------------------------------------------------------------------------


@pytest.fixture
def taken(machine, monkeypatch) -> Path:
    """A machine whose card cannot be acquired."""
    error = RuntimeError("synStatus=20 [Device already acquired] Device acquire failed.")
    module = importlib.import_module("habana_frameworks.torch.hpu")
    monkeypatch.setattr(module, "mem_get_info", raising(error))
    return machine


def test_a_card_that_is_taken_names_the_process_that_has_it(environment, taken):
    environment()
    for number, target in ((12, "null"), (345, taken / "dev/accel/accel0"), (os.getpid(), "x")):
        (taken / "proc" / str(number) / "fd").mkdir(parents=True)
        (taken / "proc" / str(number) / "fd" / "7").symlink_to(target)
        (taken / "proc" / str(number) / "cmdline").write_bytes(b"python3\0-m\0" + b"x" * 90)
    (taken / "proc" / "1").mkdir()  # of another user: its files cannot be listed
    text = refusal()
    assert text.endswith(
        f"Device acquire failed. Each process needs a card of its own: process 345 (python3 -m "
        f"{'x' * 49}...) has {taken}/dev/accel/accel0. End them first"
    )


def test_a_card_that_no_visible_process_has_may_have_another_driver(
    environment, taken, monkeypatch
):
    environment()
    assert "Another process may use the card (`hl-smi` lists processes" in refusal()
    (taken / "driver").write_text("1.20.1-97ee\n")
    monkeypatch.setattr(versions, "version", lambda name: "1.21.3.57")
    with captured_log() as log:
        assert refusal().endswith(
            "The driver is of release 1.20.1, and habana-torch-plugin of 1.21.3. If the card "
            "cannot be opened, or computes wrongly, install the driver 1.21.3 on the host, or "
            "start an image of 1.20.1"
        )
    assert any(line.startswith("the Gaudi software is of several releases: ") for line in log)


# ---- variables -----------------------------------------------------------------------------------


@loop_over(
    "devices, is_warned",
    [
        *((devices, True) for devices in ("0", "8", "none", "void", "0-1", "hpu0")),
        *((devices, False) for devices in ("", " ", "all", "ALL", "0,1", "0, 1", "0,0")),
    ],
)
def test_a_choice_of_cards_that_nothing_reads_is_reported(
    environment, machine, monkeypatch, devices, is_warned
):
    environment()
    (machine / "dev/accel/accel1").touch()
    monkeypatch.setenv("HABANA_VISIBLE_DEVICES", devices)
    with captured_log() as log, suppress(ConfigError):
        create_hpu_platform()
    text = f"HABANA_VISIBLE_DEVICES={devices} has no effect here, and 2 cards are visible"
    assert any(text in line for line in log) == is_warned


def test_modules_are_passed_on_without_spaces(environment, machine, monkeypatch):
    environment()
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", " 0, 01,")
    _ = create_hpu_platform().bridge
    assert os.environ["HABANA_VISIBLE_MODULES"] == "0,1"


@loop_over(
    "backend, variable, value, is_there",
    [
        ("gloo", "GLOO_SOCKET_IFNAME", "eth0", True),
        ("gloo", "GLOO_SOCKET_IFNAME", "eth0, lo", True),
        ("gloo", "GLOO_SOCKET_IFNAME", "eth", False),
        ("gloo", "HCCL_SOCKET_IFNAME", "ib0", True),  # nothing reads it
        ("hccl", "HCCL_SOCKET_IFNAME", "eth", True),
        ("hccl", "HCCL_SOCKET_IFNAME", "ib,=eth0", True),
        ("hccl", "HCCL_SOCKET_IFNAME", "^docker", True),
        ("hccl", "HCCL_SOCKET_IFNAME", "ib0", False),
        ("hccl", "GLOO_SOCKET_IFNAME", "ib0", False),
        ("hccl", "GLOO_SOCKET_IFNAME", "", True),
    ],
)
def test_interfaces_that_the_machine_lacks_are_refused(
    monkeypatch, backend, variable, value, is_there
):
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for name in ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, value if name == variable else "")
    if is_there:
        check_interfaces(backend)
        return
    with pytest.raises(ConfigError) as failure:
        check_interfaces(backend)
    text = f"{variable}={value}: this machine has no such network interface; it has lo, eth0"
    assert text in str(failure.value)
