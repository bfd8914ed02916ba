"""Test the table of families: its entries are consistent, and no other table in the package lists
families.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vllm.config.families import FAMILIES, family_of, family_of_architecture

PACKAGE = Path(__file__).parents[2] / "vllm"
MODELS = "vllm.model_executor.models"

# In these files, names of families are keys of something else: file -> what the keys are.
ALLOWED = {
    "entrypoints/openai/tool_parsers/manager.py": "values of --tool-call-parser",
    "reasoning/manager.py": "values of --reasoning-parser",
    "transformers_utils/gguf/tokenizer.py": "values of tokenizer.ggml.model",
}


def names_of_families() -> set[str]:
    """Return every name of a family that a second table could have as a key."""
    found = set(FAMILIES)
    for family in FAMILIES.values():
        found |= {*family.also_typed, *family.first_typed, *family.also_published_as}
        found |= {*family.architectures, *family.pooling_architectures}
        if family.gguf is not None:
            found.add(family.gguf.architecture)
    return found


NAMES = names_of_families()


def test_the_names_of_an_entry_are_classes_of_its_module():
    pooling = import_module(f"{MODELS}.pooling_decoders")
    for name, family in FAMILIES.items():
        if family.module is not None:
            module = import_module(f"{MODELS}.{family.module}")
            assert family.architectures, name
            assert all(getattr(module, each).__name__ == each for each in family.architectures)
            assert not any(hasattr(module, each) for each in family.also_published_as), name
        assert all(hasattr(pooling, each) for each in family.pooling_architectures), name
        assert family.architectures or not family.also_published_as, name


def test_every_name_is_of_one_family():
    counts = Counter(
        name
        for family in FAMILIES.values()
        for names in (
            family.architectures,
            family.also_published_as,
            family.pooling_architectures,
        )
        for name in names
    )
    counts += Counter(
        name for family in FAMILIES.values() for name in (family.model_type, *family.also_typed)
    )
    assert [name for name, count in counts.items() if count > 1] == []
    for family in FAMILIES.values():
        assert FAMILIES[family.model_type] is family
        assert all(family_of_architecture(name) is family for name in family.architectures)


def test_a_decoder_has_the_class_that_transformers_gives_its_model_type():
    for family in FAMILIES.values():
        has_own_code = family.config_class or family.config_format != "transformers"
        if family.is_encoder or family.text_type or family.decoder_keys or has_own_code:
            continue
        first = family.architectures[0]
        theirs = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family.model_type, first)
        assert theirs == first, family.model_type


def test_families_that_entries_name_are_in_the_table():
    for family in FAMILIES.values():
        for name in (family.text_type, family.config_class):
            assert name is None or family_of(name).module, family.model_type


def test_what_a_checkpoint_in_another_format_is_is_clear():
    stored = Counter(
        (family.gguf.architecture, family.gguf.has_experts, family.gguf.has_router_bias)
        for family in FAMILIES.values()
        if family.gguf is not None
    )
    assert set(stored.values()) == {1}
    params = Counter(family.in_params_json for family in FAMILIES.values())
    assert (params["dense"], params["experts"]) == (1, 1)


def test_defaults_are_for_all_classes_of_their_family():
    for family in FAMILIES.values():
        if family.config_defaults is not None:
            names = (*family.architectures, *family.pooling_architectures)
            prefix = family.config_defaults.class_prefix
            assert all(name.startswith(prefix) for name in names), family.model_type


@pytest.mark.parametrize("model_type", ["unheard_of", "", None, 3, ["llama"]])
def test_an_unknown_model_type_has_the_facts_of_no_family(model_type):
    family = family_of(model_type)
    assert family.model_type == ""
    assert family not in FAMILIES.values()
    assert family.config_defaults is None
    assert family.tokenizer is None


def tables(source: str) -> Iterator[tuple[int, list[str]]]:
    """Return line and names of each literal with three or more families as keys or entries."""
    inside: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if node in inside or not isinstance(node, (ast.Dict, ast.Set, ast.List, ast.Tuple)):
            continue
        inside |= set(ast.walk(node))
        found = sorted(
            {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)} & NAMES, key=str
        )
        if len(found) >= 3:
            yield node.lineno, found


def comparisons(source: str) -> Iterator[tuple[int, str]]:
    """Return line and text of each comparison of a model type or an architecture with a family's
    name."""
    for node in ast.walk(ast.parse(source)):
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if not isinstance(node, ast.Compare) and not (
            is_method and node.func.attr in ("startswith", "endswith")
        ):
            continue
        texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
        words = {t for t in texts if isinstance(t, str) and t not in ("", "model_type")}
        is_of_model = re.search("model_type|architecture", text := ast.unparse(node))
        if is_of_model and any(name.startswith(word) for word in words for name in NAMES):
            yield node.lineno, text


def test_nothing_else_is_keyed_by_families():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(("config/families/", "model_executor/models/")) or name in ALLOWED:
            continue
        source = path.read_text(encoding="utf-8")
        # Most files have no name of a family, and to parse them would take seconds.
        if len(NAMES.intersection(re.findall(r"""["']([^"'\n]+)(?=["'])""", source))) >= 3:
            wrong += [f"{name}:{line}: {', '.join(found)}" for line, found in tables(source)]
        if re.search("model_type|architecture", source):
            wrong += [f"{name}:{line}: {text}" for line, text in comparisons(source)]
    assert not wrong, "move to vllm/config/families/table.py:\n" + "\n".join(wrong)


def test_exceptions_are_still_needed():
    for name in ALLOWED:
        assert list(tables((PACKAGE / name).read_text(encoding="utf-8"))), name


@pytest.mark.parametrize(
    "source",
    [
        'X = {"llama": 1, "qwen2": 2, "gemma2": 3}',
        'X = {**dict.fromkeys(("opt", "phi"), 1), "bert": 2}',
        'X = frozenset({"llama", "opt", "bert"})',
        'def f(kind):\n    return kind in ("qwen2moe", "qwen3", "llama")',
        'X = {"a": "LlamaForCausalLM", "b": ("OPTForCausalLM", "PhiForCausalLM")}',
    ],
)
def test_a_second_table_is_recognised(source):
    assert list(tables(source))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('config.get("model_type") == "bamba"', True),
        ('config["model_type"] in ("bloom", "mamba")', True),
        ('model_type.startswith("gemma")', True),
        ('config.get("model_type") == "mlp_speculator"', False),
        ('config.get("model_type") == wanted', False),
        ('model.architecture != "llama"', True),
        ('arch.architecture == "DeepseekV3ForCausalLM"', True),
        ('arch.architecture.endswith("ForSequenceClassification")', False),
        ('name == "llama"', False),
    ],
)
def test_a_comparison_with_a_family_is_recognised(source, expected):
    assert bool(list(comparisons(source))) is expected
