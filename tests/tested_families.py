"""Which families each capability is tested with, read from the parameters of the tests."""

from collections.abc import Iterator
from functools import cache
from importlib import import_module

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_models import _FAMILIES

TESTS: dict[str, tuple[str, ...]] = {
    "one call on the CPU": (
        "tests.model_executor.test_fusion_parallel:test_programs_of_ranks_have_the_bits_of_their_modules",
    ),
    "tensor parallel": (
        "tests.model_executor.test_parallel_layers:test_ranks_together_compute_what_one_does",
        "tests.model_executor.test_fusion_parallel:test_programs_of_ranks_have_the_bits_of_their_modules",
    ),
    "pipeline": (
        "tests.e2e.test_pipeline_parallel:test_stages_of_every_family_give_the_tokens_of_one_process",
    ),
    "LoRA": ("tests.lora.test_peft:test_outputs_are_those_of_peft",),
    "GGUF": ("tests.model_executor.test_gguf_weights:test_logits_are_those_of_transformers",),
    "simulated Gaudi": (
        "tests.e2e.test_hpu_parity:test_every_family_gives_the_same_tokens",
        "tests.e2e.test_more_families:test_a_family_gives_the_tokens_of_transformers_on_the_simulated_card",
        "tests.e2e.test_state_families:test_states_on_a_simulated_card_are_the_same",
        "tests.e2e.test_latent_attention:test_logprobs_are_those_of_transformers_on_the_simulated_card",
        "tests.e2e.test_parallel_hpu:test_stages_of_every_family_give_the_tokens_of_the_cpu",
    ),
}
"""Capability -> module:test with a parameter `family`, any of which proves it."""
_NEGATED = {"one call on the CPU": "BY_MODULES"}
"""Capability -> a list in the module of its test of the families for which the test shows that they
lack it."""


@cache
def architectures_with(capability: str) -> frozenset[str]:
    """Architectures of which a tiny model with that capability is tested."""
    found = set()
    for test in TESTS[capability]:
        module, _, name = test.partition(":")
        without = getattr(import_module(module), _NEGATED.get(capability, ""), ())
        families = set(_families(getattr(import_module(module), name))) - set(without)
        found |= {_architecture(family) for family in families & _FAMILIES.keys()}
    return frozenset(found)


def _families(test: object) -> Iterator[str]:
    """Values of the parameter `family` of a test."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names, cases = mark.args[:2]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        for case in cases if "family" in names else ():
            values = getattr(case, "values", None)  # of pytest.param
            values = values if isinstance(values, tuple) else case
            yield values[names.index("family")] if isinstance(values, tuple) else values


def _architecture(family: str) -> str:
    create, _ = _FAMILIES[family]
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[create.model_type])
