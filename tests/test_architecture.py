"""The layers of docs/design as a test, read from the sources with `ast`: nothing is imported."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm"

# Anyone may import these; they import each other and nothing else of the package.
LEAVES = {
    "assets",
    "config",
    "cost_model",
    "env",
    "envs",
    "errors",
    "guided_decoding_params",
    "inputs",
    "kv_cache_spec",
    "logger",
    "message_codec",
    "messages",
    "outputs",
    "pooling_params",
    "request",
    "sampling_params",
    "sequence",
    "utils",
    "version",
}

# Name -> what it may import besides the leaves and itself. The names stand in the order of the
# layers: a name may only appear above what it imports.
LAYERS: dict[str, set[str]] = {
    "v1": {"engine"},
    "entrypoints": {
        "distributed",
        "lora",
        "engine",
        "hpu_check",
        "model_executor",
        "ops",
        "plan",
        "platforms",
        "reasoning",
        "transformers_utils",
    },
    "hpu_check": {
        "attention",
        "bucketing",
        "distributed",
        "model_executor",
        "ops",
        "platforms",
        "sample",
        "transformers_utils",
        "worker",
    },
    "engine": {
        "bucketing",
        "core",
        "distributed",
        "executor",
        "lora",
        "model_executor",
        "platforms",
        "structured_output",
        "transformers_utils",
    },
    "plan": {"bucketing", "model_executor", "platforms"},
    "core": set(),
    "executor": {"worker", "model_executor", "platforms", "distributed"},
    "worker": {
        "model_executor",
        "sample",
        "bucketing",
        "attention",
        "distributed",
        "ops",
        "platforms",
        "lora",
        "spec_decode",
        "structured_output",
        "multimodal",
    },
    "bucketing": set(),
    "lora": {"attention", "model_executor", "distributed", "ops", "transformers_utils"},
    "spec_decode": {"model_executor", "sample", "attention", "ops"},
    "structured_output": {"transformers_utils"},
    "multimodal": {"transformers_utils"},
    "reasoning": {"transformers_utils"},
    "sample": {"ops", "platforms"},
    "model_executor": {"attention", "ops", "distributed", "platforms", "transformers_utils"},
    "attention": {"ops", "platforms"},
    "ops": {"platforms"},
    "distributed": {"platforms"},
    "transformers_utils": set(),
    "platforms": set(),
}

# External package -> the only parts of the tree that may import it; a file or a package.
CONFINED = {
    "habana_frameworks": {"platforms/habana/real.py"},
    "torch": {
        "attention",
        "distributed",
        "entrypoints",
        "executor",
        "hpu_check",
        "lora",
        "model_executor",
        "multimodal",
        "ops",
        "plan",
        "platforms",
        "sample",
        "spec_decode",
        "structured_output",
        "worker",
    },
    "fastapi": {"entrypoints"},
    "starlette": {"entrypoints"},
    "uvicorn": {"entrypoints"},
    "zmq": {"engine", "executor"},
    "pydantic": {"entrypoints"},
    "prometheus_client": {"engine/metrics/registry.py"},
    "xgrammar": {"structured_output"},
    "llguidance": {"structured_output"},
    "ray": {"executor"},
    "transformers": {
        *("engine", "entrypoints", "multimodal", "transformers_utils"),
        "model_executor/models/transformers_model.py",  # runs its modules
    },
    "pickle": {"model_executor/loader/checkpoint.py"},  # for the name of an error
}

SOURCES = sorted(PACKAGE.rglob("*.py"))
SIMULATOR = sorted((ROOT / "gaudi_sim").rglob("*.py"))


def name_of(path: Path) -> str:
    """The module or package of the first level that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` gives a.b.

    Imports for the type checker alone are left out.
    """
    tree = parsed(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parent = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{parent}.{alias.name}") for alias in node.names)


def wrong_imports(path: Path) -> Iterator[str]:
    """What a file imports of the package that its layer does not allow."""
    here = name_of(path)
    if here == "__init__":
        return
    allowed = LEAVES if here in LEAVES else LEAVES | LAYERS[here] | {here}
    for line, name in imports(path):
        root, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        # `from vllm import LLM` is the public face, for those above everything else.
        is_public_name = target not in LEAVES | LAYERS.keys()
        if root == "vllm" and (here != "entrypoints" if is_public_name else target not in allowed):
            yield f"{path.relative_to(ROOT)}:{line}: {here} may not import {name}"


def test_every_module_has_a_layer():
    unknown = {name_of(path) for path in SOURCES} - LEAVES - LAYERS.keys() - {"__init__"}
    assert not unknown, f"give {sorted(unknown)} a place in LAYERS or LEAVES"


def test_the_layers_have_no_cycle():
    order = list(LAYERS)
    for index, (name, targets) in enumerate(LAYERS.items()):
        assert targets <= set(order[index + 1 :]), f"{name} imports something above it"


def test_imports_point_down():
    wrong = [text for path in SOURCES for text in wrong_imports(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("external", CONFINED)
def test_external_packages_stay_where_they_belong(external):
    wrong = []
    for path in SOURCES:
        file = path.relative_to(PACKAGE).as_posix()
        if file in CONFINED[external] or name_of(path) in CONFINED[external]:
            continue
        wrong += [
            f"vllm/{file}:{line}: only {sorted(CONFINED[external])} may import {external}"
            for line, name in imports(path)
            if name.partition(".")[0] == external
        ]
    assert not wrong, "\n".join(wrong)


def test_one_door_leads_to_the_simulated_card():
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        for _, name in imports(path)
        if name.partition(".")[0] == "gaudi_sim"
    }
    assert importers == {"platforms/hpu.py"}


def test_the_simulated_card_imports_the_ground_only():
    allowed = LEAVES | {"platforms"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SIMULATOR
        for line, name in imports(path)
        if name.startswith("vllm.") and name.split(".")[1] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_only_envs_reads_the_environment():
    readers = {
        path.relative_to(ROOT).as_posix() for path in SOURCES if reads_environment(path.read_text())
    }
    assert readers == {"vllm/envs.py"}


def reads_environment(source: str) -> bool:
    """Whether `os.environ`, `os.getenv` or `os.putenv` is named outside of a docstring."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            found = isinstance(node.value, ast.Name) and node.value.id == "os"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found = any(alias.name in names for alias in node.names)
        else:
            found = False
        if found:
            return True
    return False


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos.environ['A']", True),
        ("from os import getenv", True),
        ('"""Reads os.environ."""', False),
        ("self.environ = 1", False),
        ("self.environ = os.getenv('A')", True),
    ],
)
def test_reading_the_environment_is_recognised(source, expected):
    assert reads_environment(source) is expected


def test_an_upward_import_is_recognised(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "vllm")
    path = tmp_path / "vllm" / "core" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f():\n    from vllm.worker import launch\nfrom ..engine import y\n")
    assert [text.split(": ")[1] for text in wrong_imports(path)] == [
        "core may not import vllm.engine.y",
        "core may not import vllm.worker.launch",
    ]
    path.write_text("from vllm import LLM\n")
    assert len(list(wrong_imports(path))) == 1
    path.write_text("from vllm import envs\nfrom vllm.config import CacheConfig\nfrom . import z\n")
    assert not list(wrong_imports(path))
