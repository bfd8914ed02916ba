"""Test the settings that the engine makes for the bridge: which ones, when, and that values of the
user are kept.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_sim.bridge import SimBridge
from tests.hpu import captured_log
from vllm import envs
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.shared.program import run_command
from vllm.env.bridge import BRIDGE_SETTINGS, bridge_settings
from vllm.platforms.hpu import create_hpu_platform

STUBS = Path(__file__).parents[1] / "stubs"

ALWAYS = {"PT_HPU_AUTOLOAD": "0", "PT_HPU_WEIGHT_SHARING": "0"}
EARLY = {**ALWAYS, "PT_ENABLE_INT64_SUPPORT": "0", "PT_HPU_ENABLE_EAGER_CACHE": "true"}
WITHOUT_LAZY = {
    **EARLY,
    "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS": "1",
    "RUNTIME_SCALE_PATCHING": "1",
}
NAMES = [setting.name for setting in BRIDGE_SETTINGS]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in (*NAMES, envs.BRIDGE_SETTINGS_MARK, "PT_HPU_LAZY_MODE"):
        monkeypatch.delenv(name, raising=False)


def made() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def open_card(environment, monkeypatch, **variables: str) -> dict[str, str]:
    """Return the settings at the import of the bridge, with these variables of the user."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment(**variables)
    platform = create_hpu_platform()
    before = made()
    assert platform.bridge
    return before


@pytest.mark.parametrize(
    "variables, is_lazy, early, at_last",
    [
        ({"PT_HPU_LAZY_MODE": "1"}, True, ALWAYS, ALWAYS),
        ({"PT_HPU_LAZY_MODE": "0"}, False, WITHOUT_LAZY, WITHOUT_LAZY),
        ({}, False, EARLY, WITHOUT_LAZY),
        ({}, True, EARLY, EARLY),
    ],
    ids=["lazy", "eager", "the bridge says eager", "the bridge says lazy"],
)
def test_each_mode_gets_its_settings_before_the_bridge_is_imported(
    environment, card, vendor, monkeypatch, variables, is_lazy, early, at_last
):
    """Settings that depend on the mode are made when the bridge has reported the mode."""
    SimBridge("gaudi2", is_lazy=is_lazy)
    assert open_card(environment, monkeypatch, **variables) == early
    assert made() == at_last
    seen = vendor.torch.FLAGS  # the flags that were set when the stand-in was imported
    assert {name: value for name, value in early.items() if name.startswith("PT_HPU")} == {
        name: value for name, value in seen.items() if name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_the_user_stays(environment, card, vendor, monkeypatch, name):
    SimBridge("gaudi2")
    with captured_log() as log:
        open_card(environment, monkeypatch, **{name: "7"})
    assert made() == {**WITHOUT_LAZY, name: "7"}
    (line,) = [line for line in log if line.startswith("Settings of the Habana bridge: ")]
    said = dict(text.split("=") for text in line.partition(": ")[2].split(", "))
    assert said == {
        **{other: f"{value} (engine)" for other, value in WITHOUT_LAZY.items()},
        name: "7 (user)",
    }


@pytest.mark.parametrize(("word", "passed"), [("true", "1"), (" Off ", "0"), ("2", "2")])
def test_the_bridge_gets_its_mode_as_a_number(monkeypatch, word, passed):
    monkeypatch.setenv("PT_HPU_LAZY_MODE", word)
    for name in (*NAMES, envs.BRIDGE_SETTINGS_MARK):
        monkeypatch.setenv(name, "")
    envs.export_bridge_settings()
    assert os.environ["PT_HPU_LAZY_MODE"] == passed


def test_an_empty_value_is_none(environment, card, vendor, monkeypatch):
    SimBridge("gaudi2")
    open_card(environment, monkeypatch, PT_HPU_WEIGHT_SHARING="")
    assert made() == WITHOUT_LAZY
    assert envs.described_bridge_settings()["PT_HPU_WEIGHT_SHARING"] == "0 (engine)"


def test_a_child_process_tells_settings_of_its_engine_from_those_of_the_user(monkeypatch):
    monkeypatch.setenv("PT_HPU_WEIGHT_SHARING", "1")
    envs.export_bridge_settings()
    # The first call could not know whether lazy mode is used.
    assert envs.export_bridge_settings(is_lazy=False)
    assert not envs.export_bridge_settings(is_lazy=False)
    code = "from vllm import envs; print(envs.described_bridge_settings())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=envs.child_environment({}, {}),
        capture_output=True,
        text=True,
    )
    described = {name: f"{value} (engine)" for name, value in WITHOUT_LAZY.items()}
    described["PT_HPU_WEIGHT_SHARING"] = "1 (user)"
    assert done.stdout == f"{described}\n"
    # Variables that Ray passes to its workers.
    assert {*NAMES, envs.BRIDGE_SETTINGS_MARK} <= envs.passed_on().keys()


def test_a_bridge_that_was_imported_before_may_have_missed_settings(
    environment, card, vendor, monkeypatch
):
    import habana_frameworks.torch  # noqa: F401

    with captured_log() as log:
        open_card(environment, monkeypatch, PT_HPU_LAZY_MODE="1", PT_HPU_AUTOLOAD="1")
    assert [line for line in log if "imported before" in line] == [
        "habana_frameworks was imported before this engine (perhaps by torch), so it may ignore "
        "these settings: PT_HPU_WEIGHT_SHARING=0. Set PT_HPU_AUTOLOAD=0 before Python starts"
    ]


def test_a_simulated_card_gets_no_settings(environment):
    environment(VLLM_HPU_SIM="gaudi2")
    assert create_hpu_platform().bridge
    assert not made()


def test_commands_make_them_where_there_is_a_bridge(vendor, capsys):
    """Commands do this before they import torch, which may import the bridge."""
    run_command(made, lambda: ())
    assert made() == EARLY


def test_commands_make_none_without_a_bridge():
    run_command(made, lambda: ())
    assert not made()


@pytest.mark.parametrize(
    "variables, shown",
    [
        (
            {"RUNTIME_SCALE_PATCHING": "0"},
            {
                **{name: f"{value} (engine)" for name, value in EARLY.items()},
                "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS": (
                    "1 (engine, unless the bridge is in lazy mode)"
                ),
                "RUNTIME_SCALE_PATCHING": "0 (user)",
            },
        ),
        (
            {"PT_HPU_LAZY_MODE": "1"},
            {name: f"{value} (engine)" for name, value in ALWAYS.items()},
        ),
        (
            {"PT_HPU_LAZY_MODE": "0"},
            {name: f"{value} (engine)" for name, value in WITHOUT_LAZY.items()},
        ),
    ],
    ids=str,
)
def test_a_report_shows_them_and_whose_choice_they_are(
    vendor, monkeypatch, capsys, variables, shown
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["collect-env"]) == 0
    facts = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert {name: facts[name].strip() for name in NAMES if name in facts} == shown


def test_a_report_without_a_bridge_shows_what_is_set(monkeypatch, capsys):
    monkeypatch.setenv("PT_HPU_WEIGHT_SHARING", "1")
    assert main(["collect-env"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.split(":")[0] in NAMES] == ["PT_HPU_WEIGHT_SHARING: 1"]


def test_a_mode_that_is_not_known_gets_what_the_bridge_may_read_early():
    """In lazy mode the early settings have no effect, so they are made without waiting for the
    bridge.
    """
    assert [setting.name for setting in bridge_settings(None)] == [*EARLY]
    assert [setting.name for setting in bridge_settings(True)] == [*ALWAYS]
    assert [setting.name for setting in bridge_settings(False)] == [*WITHOUT_LAZY]
