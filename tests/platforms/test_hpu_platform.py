"""Test which device is chosen, and the answers of the HPU platform."""

import subprocess
import sys

import pytest
import torch

from tests.reach import use_device_nodes
from vllm import envs
from vllm.errors import ConfigError
from vllm.platforms import hpu, registry
from vllm.platforms.hpu import create_hpu_platform
from vllm.platforms.registry import detect_device

GIB = 2**30


@pytest.fixture
def resolve():
    """Resolve the platform without the cached results of earlier calls."""
    return registry.resolve_platform.__wrapped__


def test_without_card_and_simulation_auto_is_the_cpu(environment, resolve):
    environment()
    assert resolve("auto").name == "cpu"
    with pytest.raises(ConfigError, match="VLLM_HPU_SIM=gaudi2 to run on a simulated"):
        create_hpu_platform().check_present()


@pytest.mark.parametrize("device", ["auto", "hpu"])
@pytest.mark.parametrize("variable", [("VLLM_HPU_SIM", "gaudi3"), ("VLLM_USE_FAKE_HPU", "1")])
def test_a_simulated_card_is_chosen(environment, resolve, device, variable):
    environment(**dict([variable]))
    assert detect_device() == "hpu"
    assert resolve(device).name == "hpu"


def test_the_hpu_without_a_card_is_an_error_that_names_the_simulation(environment, resolve):
    environment()
    platform = resolve("hpu")
    for use in (platform.check_present, lambda: platform.bridge):
        with pytest.raises(ConfigError, match=r"no usable Gaudi card.*VLLM_HPU_SIM=gaudi2"):
            use()


def test_the_cpu_can_be_asked_for_in_spite_of_a_card(environment, resolve):
    environment(VLLM_HPU_SIM="gaudi2", VLLM_TARGET_DEVICE="cpu")
    assert resolve("auto").name == "cpu"


def test_a_card_is_the_vendor_package_and_a_device_node(environment, card):
    environment()
    assert detect_device() == "hpu"
    assert create_hpu_platform().name == "hpu"


def test_the_package_alone_is_no_card(environment, vendor, tmp_path, monkeypatch):
    environment()
    use_device_nodes(monkeypatch, tmp_path)
    assert detect_device() == "cpu"


@pytest.mark.parametrize(
    ("vendor_ids", "drivers", "num_cards"),
    [
        (["0x1da3", "0x1da3"], [None, None], 2),
        (["0x8086"], [None], 0),  # the NPU of a processor is not a Gaudi card
        (["0x8086", "0x1da3", "0x1da3"], ["intel_vpu", "habanalabs", "habanalabs"], 2),
        ([None, None], ["intel_vpu", "habanalabs"], 1),
        (["unreadable"], ["habanalabs"], 1),
        ([None, None], [None, None], 2),  # a container that does not show the PCI bus
    ],
)
def test_an_accelerator_of_another_vendor_is_no_card(
    vendor_ids, drivers, num_cards, environment, vendor, tmp_path, monkeypatch
):
    environment()
    use_device_nodes(monkeypatch, tmp_path / "dev", tmp_path / "class")
    (tmp_path / "dev" / "accel").mkdir(parents=True)
    (tmp_path / "dev" / "accel" / "accel_controlD0").touch()
    for number, (vendor_id, driver) in enumerate(zip(vendor_ids, drivers, strict=True)):
        (tmp_path / "dev" / "accel" / f"accel{number}").touch()
        device = tmp_path / "class" / f"accel{number}" / "device"
        device.mkdir(parents=True)
        if vendor_id is not None:
            (device / "vendor").write_text(f"{vendor_id}\n")
        if driver is not None:
            (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert hpu.num_cards() == num_cards
    assert detect_device() == ("hpu" if num_cards else "cpu")


def test_nodes_of_older_drivers_are_cards(tmp_path, monkeypatch):
    use_device_nodes(monkeypatch, tmp_path)
    for name in ("hl0", "hl1", "hl_controlD0"):
        (tmp_path / name).touch()
    assert hpu.num_cards() == 2


def test_the_simulation_goes_before_the_card(environment, card):
    environment(VLLM_HPU_SIM="gaudi3")
    assert create_hpu_platform().bridge.device_name == "GAUDI3"


def test_the_real_card_is_opened_on_first_use(environment, card, vendor):
    environment()
    platform = create_hpu_platform()
    assert vendor.calls == []
    assert platform.free_memory_bytes() == int(94.62 * GIB)


@pytest.mark.parametrize(("model", "gib"), [("gaudi2", 94.62), ("gaudi3", 126.5)])
def test_a_simulated_card_has_the_memory_a_process_sees(environment, model, gib):
    environment(VLLM_HPU_SIM=model)
    platform = create_hpu_platform()
    assert platform.free_memory_bytes() == int(gib * GIB)
    cache = platform.allocate_cache((64, GIB), torch.int8)  # more memory than the host has
    assert cache.device.type == platform.device_type
    assert platform.free_memory_bytes() == int(gib * GIB) - 64 * GIB
    with pytest.raises(MemoryError):
        platform.allocate_cache((64, GIB), torch.int8)
    del cache
    assert platform.free_memory_bytes() == int(gib * GIB)


def test_variables_set_the_mode(environment):
    environment(VLLM_HPU_SIM="gaudi2")
    assert not create_hpu_platform().bridge.is_lazy
    environment(VLLM_HPU_SIM="gaudi2", PT_HPU_LAZY_MODE="1", VLLM_HPU_SIM_STRICT="1")
    bridge = create_hpu_platform().bridge
    assert bridge.is_lazy and bridge.card.is_strict


def test_the_mode_of_the_bridge_is_a_declared_variable():
    assert envs.Envs.load({}).PT_HPU_LAZY_MODE is None
    assert envs.Envs.load({"PT_HPU_LAZY_MODE": "0"}).PT_HPU_LAZY_MODE is False
    assert envs.reportable({"PT_HPU_LAZY_MODE": "1", "PT_OTHER": "1"}) == {"PT_HPU_LAZY_MODE": "1"}
    assert list(envs.unknown({"VLLM_PT_HPU_LAZY_MODE": "1"})) == ["VLLM_PT_HPU_LAZY_MODE"]


def test_defaults_are_those_of_the_card():
    assert hpu.HPUPlatform.default_block_size == 128
    assert hpu.HPUPlatform.default_max_num_seqs == 128
    assert hpu.HPUPlatform.worker_class == "vllm.worker.hpu.worker:HPUWorker"


def test_without_a_simulation_nothing_of_torch_is_touched():
    code = (
        "import torch\n"
        "from vllm.platforms import resolve_platform\n"
        "assert resolve_platform('cpu').name == 'cpu'\n"
        "assert not hasattr(torch, 'hpu')\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
