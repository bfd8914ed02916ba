"""Test which device is chosen, and the answers of the HPU platform."""

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch

from tests.hpu import captured_log
from tests.loops import loop_over
from tests.reach import use_device_nodes
from vllm import envs
from vllm.env import ranks
from vllm.env.bridge import has_vendor_library
from vllm.errors import ConfigError
from vllm.platforms import hpu, registry
from vllm.platforms.habana import nodes
from vllm.platforms.hpu import create_hpu_platform
from vllm.platforms.registry import detect_device

GIB = 2**30


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """Return a function that raises an error."""

    def function(*args: object, **kwargs: object) -> NoReturn:
        raise error

    return function


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


def test_half_of_a_card_is_the_cpu_with_a_warning(environment, card, tmp_path, monkeypatch):
    environment()
    with captured_log() as log:
        with monkeypatch.context() as patch:
            use_device_nodes(patch, tmp_path / "none")  # a container without --runtime=habana
            assert detect_device() == "cpu"
        monkeypatch.setattr(hpu, "has_vendor_library", lambda: False)
        assert detect_device() == "cpu"
    assert [line.partition(": ")[2][:45] for line in log] == [
        "there is no Gaudi among /dev/accel/accel* and",
        "the package habana_frameworks (habana-torch-p",
    ]


def test_another_package_of_the_vendor_is_not_the_bridge(tmp_path, monkeypatch):
    (tmp_path / "habana_frameworks" / "mediapipe").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert not has_vendor_library()
    (tmp_path / "habana_frameworks" / "torch").mkdir()
    importlib.invalidate_caches()
    assert has_vendor_library()
    del sys.modules["habana_frameworks"]


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("torch 2.9.0+cpu is not the 2.11 that the bridge was built for"),
        ImportError("libSynapse.so: cannot open shared object file"),
        OSError("undefined symbol: synInitialize\n  at 0x1"),
    ],
)
def test_a_bridge_that_cannot_be_loaded_is_an_error_of_one_line(
    environment, card, monkeypatch, error
):
    environment()
    monkeypatch.setattr("vllm.platforms.habana.real.find_parts", raising(error))
    with pytest.raises(ConfigError) as failure:
        _ = create_hpu_platform().bridge
    text = str(failure.value)
    assert "\n" not in text and str(error).splitlines()[0] in text
    found = f"cannot be loaded: {str(error).splitlines()[0]}. Found: torch {torch.__version__} ("
    assert found in text


@pytest.mark.parametrize(
    ("visible", "advice"),
    [
        ("", "of its own)"),
        (
            "2,3",
            "of its own, and HABANA_VISIBLE_MODULES=2,3 allows no other (the cards here are the "
            "modules 0))",
        ),
    ],
)
def test_a_card_that_is_taken_is_an_error_of_one_line(
    environment, card, vendor, tmp_path, monkeypatch, visible, advice
):
    environment()
    (tmp_path / "accel0" / "device").mkdir(parents=True)
    (tmp_path / "accel0" / "device" / "module_id").write_text("0\n")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    error = RuntimeError("synStatus=8 [Device not found] Device acquire failed.\n#0 libc")
    module = importlib.import_module("habana_frameworks.torch.hpu")
    monkeypatch.setattr(module, "mem_get_info", raising(error))
    with pytest.raises(ConfigError) as failure:
        _ = create_hpu_platform().bridge
    text = str(failure.value)
    assert "\n" not in text and advice in text
    assert "opened: synStatus=8 [Device not found] Device acquire failed. Another pro" in text


def test_too_few_cards_name_all_sizes_that_need_them(environment, card, vendor):
    environment()
    platform = create_hpu_platform()
    for use in (lambda: platform.set_rank(3, 4), lambda: platform.check_present(4)):
        with pytest.raises(ConfigError, match="needs 4 cards of this machine, one for each"):
            use()
    platform.check_present(1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{}/recipes,false,8GB", "expected `path,delete at start,size in MB`"),
        ('"{}/recipes,false,8"', "expected `path,delete at start,size in MB`"),
        ("~/recipes,false,8", r"does not replace ~ by a home folder\. Write the whole path"),
        ("{}/recipes,8192,false", "expected `path,delete at start,size in MB`"),
        ("{}/file/recipes", r"file/recipes cannot be created: Not a directory\. Name a folder"),
    ],
)
def test_a_card_is_not_opened_without_the_folder_of_recipes(
    environment, card, vendor, tmp_path, config, message
):
    (tmp_path / "file").touch()
    environment(PT_HPU_RECIPE_CACHE_CONFIG=config.format(tmp_path))
    with pytest.raises(ConfigError, match=message):
        _ = create_hpu_platform().bridge
    assert vendor.calls == []


def test_recipes_of_a_volume_that_is_read_only_are_used_with_a_warning(
    environment, card, vendor, tmp_path, monkeypatch
):
    monkeypatch.setattr("vllm.env.recipe_folder.os.access", lambda path, mode: path != tmp_path)
    environment(PT_HPU_RECIPE_CACHE_CONFIG=f"{tmp_path},false,8")
    with captured_log() as log:
        _ = create_hpu_platform().bridge
    assert any("recipes that it compiles are not kept" in line for line in log)


@loop_over(
    "free_mb, kept_mb, is_emptied, missing_mb",
    [(8, 0, "false", None), (6, 2, "false", None), (6, 2, "true", 2), (0, 0, "false", 8)],
)
def test_a_disk_with_too_little_space_for_recipes_is_reported(
    environment,
    card,
    vendor,
    tmp_path_factory,
    monkeypatch,
    free_mb,
    kept_mb,
    is_emptied,
    missing_mb,
):
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "0").mkdir()
    with (folder / "0" / "recipe").open("wb") as file:
        file.truncate(kept_mb * 2**20)
    usage = type(shutil.disk_usage(folder))(2**40, 0, free_mb * 2**20)
    monkeypatch.setattr("vllm.env.recipe_folder.shutil.disk_usage", lambda path: usage)
    environment(PT_HPU_RECIPE_CACHE_CONFIG=f"{folder},{is_emptied},8")
    with captured_log() as log:
        _ = create_hpu_platform().bridge
    said = [line for line in log if "recipes may take 8 MB" in line]
    assert len(said) == (missing_mb is not None)
    assert all(
        f"{free_mb} MB free. If" in line and f"Free {missing_mb} MB" in line for line in said
    )


def test_a_card_of_another_kind_is_refused_and_a_variant_is_not(
    environment, card, vendor, monkeypatch
):
    environment()
    monkeypatch.delenv("HABANA_VISIBLE_MODULES", raising=False)
    module = importlib.import_module("habana_frameworks.torch.hpu")
    monkeypatch.setattr(module, "get_device_name", lambda: "GAUDI2C")
    assert create_hpu_platform().bridge.device_name == "GAUDI2"
    monkeypatch.setattr(module, "get_device_name", lambda: "GAUDI")  # the first generation
    with pytest.raises(ConfigError, match="the card is a GAUDI of the first generation"):
        _ = create_hpu_platform().bridge


@pytest.mark.parametrize("visible", ["all", "0-3", "0,0", "hpu0", "1;2", "-1", "0,1,01"])
def test_modules_that_are_no_numbers_are_refused(environment, card, monkeypatch, visible):
    environment()
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    for use in (lambda: create_hpu_platform().bridge, lambda: ranks.rank_variables(0, 2)):
        with pytest.raises(ConfigError, match="different numbers of modules, separated by commas"):
            use()


@pytest.mark.parametrize(
    ("visible", "modules", "cards"),
    [
        ("", [], ["0", "1"]),  # the system does not report them
        ("", ["5", "4"], ["4", "5"]),  # a container with two of eight cards
        ("", ["0", "1"], ["0", "1"]),
        ("", ["5", "unreadable"], ["0", "1"]),
        (" 7, 6,", ["5", "4"], ["7", "6"]),  # the order of the user
    ],
)
def test_ranks_take_the_modules_of_the_container(
    environment, card, tmp_path, monkeypatch, visible, modules, cards
):
    environment()
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    for number, module in enumerate(modules):
        (tmp_path / "accel" / f"accel{number}").touch()
        (tmp_path / f"accel{number}" / "device").mkdir(parents=True)
        (tmp_path / f"accel{number}" / "device" / "module_id").write_text(f"{module}\n")
    create_hpu_platform()
    assert [ranks.rank_variables(rank, 2)["HLS_MODULE_ID"] for rank in range(2)] == cards


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
    assert nodes.num_cards() == num_cards
    assert detect_device() == ("hpu" if num_cards else "cpu")


@pytest.mark.parametrize(
    ("devices", "modules", "is_warned"),
    [
        ("1", "", True),
        ("0,1", "", False),  # the container runtime has made these two visible
        ("1", "1", False),
        ("all", "", False),
        ("", "", False),
    ],
)
def test_a_choice_of_cards_that_only_containers_know_is_reported(
    environment, card, tmp_path, monkeypatch, devices, modules, is_warned
):
    environment()
    (tmp_path / "accel" / "accel1").touch()
    monkeypatch.setenv("HABANA_VISIBLE_DEVICES", devices)
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", modules)
    with captured_log() as log:
        create_hpu_platform()
    text = "HABANA_VISIBLE_DEVICES=1 has no effect here, and 2 cards are visible"
    assert any(text in line for line in log) == is_warned


def test_nodes_of_older_drivers_are_cards(tmp_path, monkeypatch):
    use_device_nodes(monkeypatch, tmp_path)
    for name in ("hl0", "hl1", "hl_controlD0"):
        (tmp_path / name).touch()
    assert nodes.num_cards() == 2


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
