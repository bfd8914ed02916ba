"""Test that the columns of docs/supported_models.md show what tests run."""

import pytest

from tests.tested_families import PROOFS, architectures_with


@pytest.mark.parametrize("capability", PROOFS)
def test_every_column_has_families_from_its_tests(capability):
    assert "LlamaForCausalLM" in architectures_with(capability)


def test_what_a_test_leaves_out_is_not_in_the_column():
    assert "Llama4ForCausalLM" not in architectures_with("LoRA")
    assert "MambaForCausalLM" not in architectures_with("GGUF")
