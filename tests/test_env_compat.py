"""Variables of the Gaudi fork that have no effect, and those that other software reads."""

from collections import Counter
from dataclasses import fields

import pytest

from vllm import envs
from vllm.env_compat import _VARIABLES, COMPAT_VARIABLES
from vllm.env_others import OTHER_READERS
from vllm.envs import Envs

READ_BY_OTHERS = [name for reader in OTHER_READERS for name in reader.names]


def names(variables):
    return [variable.name for variable in variables]


def test_every_name_is_an_identifier_and_known_once():
    known = [f.name for f in fields(Envs)] + names(_VARIABLES) + READ_BY_OTHERS
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


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_PROMPT_QUERY_BUCKET_MIN",
        "VLLM_PROMPT_SEQ_BUCKET_LIMIT",
        "VLLM_ENGINE_ITERATION_TIMEOUT_S",
        "VLLM_RPC_TIMEOUT",
        "VLLM_DISABLE_MARK_SCALES_AS_CONST",
        "VLLM_HPU_MULTI_MODEL_CONFIG",
    ],
)
def test_variables_that_users_of_the_fork_set_are_known(name):
    assert envs.unknown({name: "1"}) == {}
    assert names(envs.without_effect({name: "1"})) == [name]
    assert envs.refused({name: "1"}) == []


@pytest.mark.parametrize("name", READ_BY_OTHERS)
def test_what_others_read_is_not_spoken_of(name):
    environ = {name: "1"}
    assert not envs.unknown(environ) and not envs.without_effect(environ)
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
        ("VLLM_DEFRAG", "0", "maybe"),
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
