"""Find the families with which each capability is tested, from the parameters of the tests."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_models import FAMILY_CONFIGS


@dataclass(frozen=True)
class Proof:
    """A test, and the parameters with which it proves a capability.

    Attributes:
        test: module:name; it has a parameter `family`.
        where: required values of other parameters, by name.
    """

    test: str
    where: dict[str, Any] = field(default_factory=dict)

    def families(self) -> set[str]:
        """Return the families in the parameters of the test, whatever its marks."""
        module_name, _, name = self.test.partition(":")
        module = import_module(module_name)
        rows = [r for r in _rows(getattr(module, name)) if self.where.items() <= r.items()]
        return {row["family"] for row in rows}


_TABLE = "tests.e2e.test_equal_to_transformers:test_outputs_are_those_of_transformers"
_RANKS = "tests.model_executor.test_parallel_layers:test_ranks_together_compute_what_one_does"

PROOFS: dict[str, tuple[Proof, ...]] = {
    "modules": (Proof(_TABLE, {"mode": "CPU"}),),
    "program": (
        Proof(
            "tests.model_executor.test_program_parity:"
            "test_logits_of_the_program_are_those_of_transformers"
        ),
    ),
    "bf16": (
        Proof(
            "tests.model_executor.test_bfloat16:test_modules_are_as_near_to_float32_as_transformers"
        ),
    ),
    "HPU graphs": (Proof(_TABLE, {"mode": "HPU graphs"}),),
    "torch.compile": (Proof(_TABLE, {"mode": "torch.compile"}),),
    "2 ranks": (Proof(_RANKS, {"tp_size": 2}),),
    "4 ranks": (Proof(_RANKS, {"tp_size": 4}),),
    "pipeline": (
        Proof(
            "tests.e2e.test_pipeline_parallel:"
            "test_stages_of_every_family_give_the_tokens_of_one_process"
        ),
    ),
    "LoRA": (Proof("tests.lora.test_peft:test_outputs_are_those_of_peft"),),
    "GGUF": (
        Proof("tests.model_executor.test_gguf_weights:test_logits_are_those_of_transformers"),
    ),
}
"""Capability -> tests, any of which proves it."""


@cache
def architectures_with(capability: str) -> frozenset[str]:
    """Return the architectures for which a tiny model is tested with this capability."""
    families = set().union(*(proof.families() for proof in PROOFS[capability]))
    return frozenset(_architecture(family) for family in families & FAMILY_CONFIGS.keys())


def _rows(test: object) -> Iterator[dict[str, Any]]:
    """Return the parameters of each case of a test, by name."""
    marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
    for cases in product(*(list(_cases(*mark.args[:2])) for mark in marks)):
        yield {name: value for case in cases for name, value in case.items()}


def _cases(names: Any, cases: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each case of one `parametrize` mark, by name."""
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    for case in cases:
        if isinstance(case, type(pytest.param())):
            values = case.values
        else:
            values = case if len(names) > 1 else (case,)
        yield dict(zip(names, values, strict=True))


def _architecture(family: str) -> str:
    create, _ = FAMILY_CONFIGS[family]
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[create.model_type])
