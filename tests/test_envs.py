"""Test environment variables: parsing, defaults, unknown names, and which modules may read them."""

import re
from dataclasses import FrozenInstanceError, fields
from itertools import groupby
from pathlib import Path

import pytest

import vllm
from vllm import envs
from vllm.envs import Envs
from vllm.errors import ConfigError

PACKAGE = Path(vllm.__file__).parent


def test_without_variables_everything_has_its_default():
    loaded = Envs.load({})
    assert loaded.VLLM_TARGET_DEVICE is None
    assert loaded.VLLM_LOGGING_LEVEL == "INFO"
    assert loaded.VLLM_CPU_KVCACHE_SPACE is None
    assert loaded.VLLM_CPU_KERNELS is True


def test_values_are_parsed_to_the_declared_type():
    loaded = Envs.load(
        {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_LOGGING_LEVEL": "debug",
            "VLLM_CPU_KVCACHE_SPACE": " 0.5 ",
            "VLLM_CPU_KERNELS": "0",
            "PATH": "/bin",
        }
    )
    assert loaded.VLLM_TARGET_DEVICE == "cpu"
    assert loaded.VLLM_LOGGING_LEVEL == "DEBUG"
    assert loaded.VLLM_CPU_KVCACHE_SPACE == 0.5
    assert loaded.VLLM_CPU_KERNELS is False


@pytest.mark.parametrize("word", ["1", "true", "True", "t", "YES", "y", "on"])
def test_every_word_for_true_is_true(word):
    # The default of this variable is True: the test shows that each of these words is accepted.
    assert Envs.load({"VLLM_CPU_KERNELS": word}).VLLM_CPU_KERNELS is True


def test_a_value_of_the_fork_turns_its_switch_on():
    assert Envs.load({"VLLM_PROFILER_ENABLED": "full"}).VLLM_PROFILER_ENABLED is True
    with pytest.raises(ConfigError, match="expected 0, 1, true or false"):
        Envs.load({"VLLM_SKIP_WARMUP": "full"})


@pytest.mark.parametrize("word", ["0", "false", "F", "No", "n", "OFF"])
def test_every_word_for_false_is_false(word):
    assert Envs.load({"VLLM_CPU_KERNELS": word}).VLLM_CPU_KERNELS is False


@pytest.mark.parametrize("name", ["VLLM_TARGET_DEVICE", "VLLM_CPU_KERNELS", "VLLM_LOGGING_LEVEL"])
def test_an_empty_value_means_not_set(name):
    assert Envs.load({name: " "}) == Envs.load({})


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("VLLM_CPU_KERNELS", "maybe", "0, 1, true or false"),
        ("VLLM_CPU_KVCACHE_SPACE", "4GB", "a number of at least 0"),
        ("VLLM_CPU_KVCACHE_SPACE", "nan", "a number of at least 0"),
        ("VLLM_CPU_KVCACHE_SPACE", "inf", "a number of at least 0"),
        ("VLLM_CPU_KVCACHE_SPACE", "-1", "a number of at least 0"),
        ("VLLM_TARGET_DEVICE", "cuda", "one of hpu, cpu"),
        ("VLLM_LOGGING_LEVEL", "LOUD", "one of DEBUG, INFO, WARNING, ERROR, CRITICAL"),
    ],
)
def test_a_bad_value_names_variable_value_and_accepted_form(name, value, accepted):
    with pytest.raises(ConfigError) as failure:
        Envs.load({name: value})
    assert str(failure.value) == f"{name}={value!r}: expected {accepted}"


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("VLLM_GRAPH_RESERVED_MEM", "100.5", "a number from 0 to 1$"),
        (
            "VLLM_GRAPH_RESERVED_MEM",
            "10%",
            "a number from 0 to 1. It is a fraction: write 10 % as 0.1",
        ),
        (
            "VLLM_GRAPH_PROMPT_RATIO",
            "30",
            "a number from 0 to 1. It is a fraction: write 30 % as 0.3",
        ),
        ("VLLM_GRAPH_PROMPT_RATIO", "-0.1", "a number from 0 to 1$"),
        ("VLLM_GRAPH_PROMPT_RATIO", "'0.3'", "a number from 0 to 1. Remove the quotation marks"),
        ("VLLM_SKIP_WARMUP", '"true"', "0, 1, true or false. Remove the quotation marks"),
        ("VLLM_SKIP_WARMUP", "true # for now", "0, 1, true or false. Remove the comment"),
        ("VLLM_TARGET_DEVICE", "'hpu'", "one of hpu, cpu. Remove the quotation marks"),
        ("VLLM_DECODE_BS_BUCKET_STEP", "0", "an integer of at least 1"),
        ("VLLM_GC_THR_GEN1", "1e3", "an integer of at least 0$"),
        ("VLLM_GC_THR_GEN1", "9" * 20, "an integer from 0 to 2147483647"),
        (
            "VLLM_BUCKETING_STRATEGY",
            "even",
            "one of linear, exponential, sparse, pad, optimal, lin",
        ),
    ],
)
def test_settings_of_gaudi_are_checked(name, value, accepted):
    with pytest.raises(ConfigError, match=f"expected {accepted}"):
        Envs.load({name: value})


@pytest.mark.parametrize(("word", "level"), [("warn", "WARNING"), ("FATAL", "CRITICAL")])
def test_other_names_of_logging_for_a_level_are_taken(word, level):
    found = Envs.load({"VLLM_LOGGING_LEVEL": word})
    assert found.VLLM_LOGGING_LEVEL.startswith(level)


def test_text_is_taken_as_it_is():
    assert Envs.load({"VLLM_LOGGING_PREFIX": "[a] "}).VLLM_LOGGING_PREFIX == "[a] "


def test_every_variable_says_what_it_does_in_a_section():
    sections = [f.metadata["section"] for f in fields(Envs)]
    assert all(f.metadata["help"].endswith(".") for f in fields(Envs))
    # All variables of a section come one after another, so that each section is one heading of the
    # documentation.
    assert len([section for section, _ in groupby(sections)]) == len(set(sections))


def test_unknown_names_are_reported_with_the_nearest_known_one():
    environ = {
        "VLLM_CPU_KERNEL": "1",
        "VLLM_QUITE_ELSE": "1",
        "VLLM_MAX_MODEL_LEN": "4096",
        "VLLM_USE_V1": "1",
        "VLLM_API_KEY": "1",
        "VLLM_SERVER_CONFIG_FILE": "1",
        "CPU_KERNEL": "1",
    }
    assert envs.unknown(environ) == {
        "VLLM_CPU_KERNEL": "VLLM_CPU_KERNELS",
        "VLLM_QUITE_ELSE": None,
        "VLLM_MAX_MODEL_LEN": "--max-model-len",
    }


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PT_HPU_LAZYMODE", "PT_HPU_LAZY_MODE"),
        ("PT_HPU_RECIPE_CACHE_CONF", "PT_HPU_RECIPE_CACHE_CONFIG"),
        ("PT_HPU_GRAPH_DISABLE_TENSOR_CACHE", "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"),
        ("HABANA_VISIBLE_MODULE", "HABANA_VISIBLE_MODULES"),
        ("QUANT_CONFIGS", "QUANT_CONFIG"),
        ("PT_HPU_METRICS_FILE", None),
        ("PT_HPU_ENABLE_SOMETHING", None),  # the bridge has more than this package knows
        ("PT_HPU_LAZY_MODE", None),
        ("PT_HPU_SDPA_BR_FACTOR", None),
        ("OTHER_PT_HPU_LAZYMODE", None),
    ],
)
def test_a_misspelt_name_of_other_software_is_reported(name, nearest):
    assert envs.misspelt({name: "1"}) == ({} if nearest is None else {name: nearest})


def test_variables_of_kubernetes_services_are_not_taken_for_settings():
    """A pod has them for each service; ours in examples/kubernetes is called vllm."""
    environ = {
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_SERVICE_PORT": "80",
        "VLLM_SERVICE_PORT_HTTP": "80",
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "VLLM_PORT_80_TCP": "tcp://10.0.0.1:80",
        "VLLM_PORT_80_TCP_ADDR": "10.0.0.1",
        "VLLM_LLAMA_8B_SERVICE_HOST": "10.0.0.2",
        "VLLM_LLAMA_8B_PORT_8000_TCP_PROTO": "tcp",
    }
    assert envs.unknown(environ) == {} and envs.without_effect(environ) == []
    del environ["VLLM_SERVICE_HOST"], environ["VLLM_LLAMA_8B_SERVICE_HOST"]
    assert len(envs.unknown(environ)) == 5
    assert [variable.name for variable in envs.without_effect(environ)] == ["VLLM_PORT"]


def test_a_report_shows_settings_and_hides_secrets():
    shown = {
        "HABANA_VISIBLE_DEVICES": "all",
        "PT_HPU_LAZY_MODE": "1",
        "QUANT_CONFIG": "quant.json",
        "VLLM_USE_V1": "1",
    }
    hidden = {"VLLM_API_KEY": "sesame"}
    assert envs.reportable({**shown, **hidden, "HF_TOKEN": "sesame"}) == {
        **shown,
        "VLLM_API_KEY": "***",
    }


def test_the_environment_is_read_once_and_cannot_be_changed(monkeypatch):
    envs.get.cache_clear()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert envs.get().VLLM_CPU_KVCACHE_SPACE == 2
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert envs.get().VLLM_CPU_KVCACHE_SPACE == 2
    with pytest.raises(FrozenInstanceError):
        envs.get().VLLM_CPU_KVCACHE_SPACE = 4
    envs.get.cache_clear()


def test_only_envs_touches_the_environment():
    access = re.compile(r"\b(environb?|getenvb?|putenv|unsetenv)\b")
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(access.search(line.partition("#")[0]) for line in path.read_text().splitlines())
    }
    assert users == {"envs.py"}


def test_workers_on_other_machines_get_what_is_not_of_one_machine_and_no_secret(monkeypatch):
    passed = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "HABANA_LOGS": "/tmp",
        "PT_HPU_LAZY_MODE": "1",
        "GC_KERNEL_PATH": "/lib/kernels.so",
        "OMP_NUM_THREADS": "4",
        "LD_LIBRARY_PATH": "/lib",
        "HCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "QUANT_CONFIG": "/quant.json",
        "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS": "1",
        "ENABLE_EXPERIMENTAL_FLAGS": "1",
        "LOG_LEVEL_ALL": "4",
    }
    kept = {
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "HABANA_VISIBLE_MODULES": "0,1",
        "HLS_MODULE_ID": "0",
        "HOME": "/root",
    }
    for name, value in {**passed, **kept}.items():
        monkeypatch.setenv(name, value)
    found = envs.passed_on()
    assert passed.items() <= found.items()
    assert not kept.keys() & found.keys()


_QUERY, _SEQ = "VLLM_PROMPT_QUERY_BUCKET_MIN", "VLLM_PROMPT_SEQ_BUCKET_MIN"


@pytest.mark.parametrize(
    "environ",
    [{_QUERY: "256"}, {_SEQ: "256"}, {_QUERY: " 256", _SEQ: "256"}, {_QUERY: "256", _SEQ: ""}],
)
def test_the_new_name_of_a_variable_is_read_as_its_old_one(environ):
    assert Envs.load(environ) == Envs(VLLM_PROMPT_SEQ_BUCKET_MIN=256)
    assert not envs.unknown(environ) and not envs.without_effect(environ)


def test_two_names_of_one_variable_have_one_value():
    with pytest.raises(
        ConfigError, match=rf"{_SEQ}=128 and {_QUERY}=256 are two names of one setting"
    ):
        Envs.load({_QUERY: "256", _SEQ: "128"})
    with pytest.raises(ConfigError, match=rf"^{_QUERY}='many': expected an integer"):
        Envs.load({_QUERY: "many"})
