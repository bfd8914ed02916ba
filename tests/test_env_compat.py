"""Test variables of the Gaudi fork that have no effect, and variables that other software reads."""

import re
from collections import Counter
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import vllm
from tests.loops import loop_over
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.fields import config_fields, config_sections
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.env.compat import COMPAT_VARIABLES, VARIABLES, variable_of_feature
from vllm.env.others import OTHER_READERS
from vllm.envs import Envs
from vllm.model_executor.models.registry import ModelRegistry

ABSENT = {
    "models are not downloaded from ModelScope": "text:import modelscope",
    "names of models cannot be redirected to other folders": "text:model_redirect",
    "results are not bit for bit the same": "text:batch_invariant",
    "there is only one engine, of the V1 design": "module:vllm.core.block_manager",
    "the Gaudi fork does not read it either": "variable:VLLM_PROMPT_BS_BUCKET_LIMIT",
    "the compile cache that it controls": "text:standalone_compile",
    "weights are read one tensor at a time": "text:load_force_sync",
    "tokens that tie with the k-th most likely one": "text:topk_duplicates",
    "all settings are always available": "text:experimental_flags",
    "calls of functions are not traced": "text:sys.settrace",
    "batch sizes are not logged": "text:log_batchsize",
    "no usage data is ever sent": "text:stats.vllm.ai",
    "quantization on a card has no such": "text:force_channel_fp8",
    "MoE execution has no setting but": "flag:all2all_backend",
    "the state of Mamba layers has only one layout": "flag:mamba_cache_dtype",
    "latent attention has only one implementation": "text:mla_disable",
    "the results of several devices are always added in one": "text:row_parallel_chunks",
    "each Ray actor is always one worker": "text:compiled_dag",
    "messages between processes are never pickled": "text:pickle.dumps",
    "responses are not logged": "flag:enable_log_outputs",
    "no tool parser needs a timeout": "text:tool_parse_regex_timeout",
    "a server serves one model": "text:/v1/models/switch",
    "it belongs to the V0 engine, which this version does not": "module:vllm.core.block_manager",
    "this version keeps no files there; HF_HOME": "variable:VLLM_CACHE_ROOT",
    "models that are given by name": "text:import modelscope",
    "the engine process of a server starts with GOMP": "variable:GOMP_SPINCOUNT",
    "this package does not load them": "text:import pynvml",
    "this package does not use them": "text:import nixl",
}
"""Beginning of a reason that says that something does not exist, or that there is one of it -> what
is there no longer so, as kind:name. When this fails, the reason is stale: correct it."""

_CLAIM = re.compile(r"\b(no|not|never|nothing|neither|only|one)\b")


def test_names_of_flags_that_are_tried_as_variables_are_flags():
    assert {name.lower() for name in envs.FLAG_NAMES} <= flags()


@cache
def sources() -> str:
    """Return the sources of the package, except the sources of the reasons themselves."""
    root = Path(vllm.__file__).parent
    paths = [path for path in root.rglob("*.py") if path.parent != root / "env"]
    return "\n".join(path.read_text() for path in paths).lower()


@cache
def flags() -> frozenset[str]:
    """Return the arguments that have an effect."""
    engine = (f.name for s in config_sections(VllmConfig).values() for f in config_fields(s))
    return frozenset((*engine, *(f.name for f in config_fields(ServerArgs))))


def exists(marker: str) -> bool:
    kind, name = marker.split(":", 1)
    return {
        "module": lambda: find_spec(name) is not None,
        "flag": lambda: name in flags(),
        "variable": lambda: name in {f.name for f in fields(Envs)},
        "architecture": lambda: name in ModelRegistry.supported(),
        "text": lambda: name in sources(),
    }[kind]()


READ_BY_OTHERS = [name for reader in OTHER_READERS for name in reader.names]


def names(variables):
    return [variable.name for variable in variables]


def test_every_name_is_an_identifier_and_known_once():
    known = [f.name for f in fields(Envs)] + names(VARIABLES) + READ_BY_OTHERS
    assert all(name.isidentifier() for name in known)
    assert not [name for name, count in Counter(known).items() if count > 1]


def test_every_reason_is_a_clause():
    for variable in COMPAT_VARIABLES.values():
        assert variable.reason.strip() == variable.reason != ""
        assert not variable.reason.endswith(".")


def test_every_variable_a_reason_points_to_has_an_effect():
    declared = {f.name for f in fields(Envs)}
    for variable in COMPAT_VARIABLES.values():
        for word in variable.reason.replace(";", " ").replace("=", " ").split():
            assert not word.startswith("VLLM_") or word.strip(",") in declared, variable


REASONS = dict.fromkeys(
    [
        *(variable.reason for variable in COMPAT_VARIABLES.values()),
        *(reader.note for reader in OTHER_READERS),
    ]
)


@loop_over("reason", REASONS)
def test_what_a_reason_says_of_this_version_is_so(reason):
    """Features that a reason denies do not exist, and arguments that it names exist."""
    if _CLAIM.search(reason) or reason in names_of_refused():
        (marker,) = [marker for text, marker in ABSENT.items() if reason.startswith(text)]
        assert not exists(marker), f"stale: {reason!r}, as there is {marker}"
    named = [word.removeprefix("--").replace("-", "_") for word in re.findall(r"--[\w-]+", reason)]
    named += re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", reason)
    assert set(named) <= flags() | {"huggingface_hub", "external_launcher"}, reason


def names_of_refused() -> set[str]:
    return {variable.reason for variable in COMPAT_VARIABLES.values() if not variable.available}


@pytest.mark.parametrize(
    ("stale", "marker"),
    [
        ("this version runs no models with recurrent state", "architecture:BambaForCausalLM"),
        ("the KV cache is not defragmented", "module:vllm.worker.hpu.launches.block_moves"),
        ("this version runs in one process, on one card", "flag:tensor_parallel_size"),
        ("there is no prefix caching", "text:prefix_caching"),
        ("there is no merged prefill", "variable:VLLM_MERGED_PREFILL"),
    ],
)
def test_a_reason_that_has_become_stale_is_found(stale, marker):
    assert _CLAIM.search(stale) and exists(marker)


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_COMMIT_HASH",
        "VLLM_CUSTOM",
        "VLLM_PROMPT_SEQ_BUCKET_LIMIT",
        "VLLM_ENGINE_ITERATION_TIMEOUT_S",
        "VLLM_RPC_TIMEOUT",
        "VLLM_DISABLE_MARK_SCALES_AS_CONST",
        "VLLM_HPU_MULTI_MODEL_CONFIG",
        *(
            "VLLM_REQUANT_FP8_INC",
            "VLLM_ENABLE_RUNTIME_DEQUANT",
            "VLLM_MOE_N_SLICE",
            "VLLM_EP_SIZE",
        ),
        *("VLLM_MLA_PERFORM_MATRIX_ABSORPTION", "VLLM_ENGINE_PROFILER_STEPS"),
        *("VLLM_MAX_CONCURRENT_PREPROC", "VLLM_SUSPEND_PROMPT", "VLLM_DECODE_SEQ_BUCKET_MAX"),
    ],
)
def test_variables_that_users_of_the_fork_set_are_known(name):
    assert envs.unknown({name: "1"}) == {}
    assert names(envs.without_effect({name: "1"})) == [name]
    assert envs.refused({name: "1"}) == []


@loop_over(
    "name, reason",
    [
        ("VLLM_USE_FLASHINFER_MOE_FP8", "it is for a different kind of device"),
        ("VLLM_DISABLE_PYNCCL", "it is for a different kind of device"),
        ("VLLM_ROCM_USE_SOMETHING_NEW", "it is for a different kind of device"),
        ("VLLM_SPLIT_MOE_COMPILATION", "MoE execution has no setting but"),
        ("VLLM_NEW_MLA_PATH", "latent attention has only one"),
        ("VLLM_RAY_DP_PACK_STRATEGY", "--data-parallel-size starts the replicas"),
        ("VLLM_ENABLE_EXPERT_PARALLEL", None),  # a flag
        ("VLLM_MOEBIUS", None),
    ],
)
def test_a_word_of_a_name_says_why_it_has_no_effect(name, reason):
    found = envs.without_effect({name: "1"})
    assert [variable.name for variable in found] == ([name] if reason else [])
    assert all(variable.reason.startswith(reason) for variable in found)
    assert list(envs.unknown({name: "1"})) == ([] if reason else [name])


def test_no_variable_with_an_effect_has_a_word_of_a_feature_that_has_none():
    """Otherwise a misspelt name would not lead to the right one."""
    assert not [f.name for f in fields(Envs) if variable_of_feature(f.name)]


def test_what_others_read_is_not_spoken_of():
    environ = dict.fromkeys(READ_BY_OTHERS, "1")
    assert not envs.unknown(environ)
    assert not envs.without_effect(environ)
    assert not envs.refused(environ)


def test_an_empty_value_asks_for_nothing():
    assert envs.without_effect(dict.fromkeys(COMPAT_VARIABLES, " ")) == []
    assert envs.refused(dict.fromkeys(COMPAT_VARIABLES, "")) == []


@pytest.mark.parametrize(
    ("name", "quiet", "reported"),
    [
        ("VLLM_USE_V1", "1", "0"),
        ("VLLM_HANDLE_TOPK_DUPLICATES", "True", "false"),
        ("VLLM_ENABLE_BUCKETING", "y", "f"),
        ("VLLM_DELAYED_SAMPLING", "true", "false"),
        ("VLLM_DEFRAG", "1", "0"),
    ],
)
def test_a_switch_that_asks_for_what_happens_anyway_is_not_reported(name, quiet, reported):
    assert envs.without_effect({name: quiet}) == []
    assert names(envs.without_effect({name: reported})) == [name]


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("VLLM_MODEL_REDIRECT_PATH", "map.json", True),
        ("VLLM_USE_MODELSCOPE", "true", True),
        ("VLLM_USE_MODELSCOPE", "false", False),
        ("VLLM_BATCH_INVARIANT", "1", True),
        ("VLLM_BATCH_INVARIANT", "0", False),
    ],
)
def test_what_would_compute_something_else_is_refused(name, value, is_refused):
    assert names(envs.refused({name: value})) == ([name] if is_refused else [])
    assert envs.without_effect({name: value}) == []
