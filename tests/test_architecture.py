"""Test the layers of pyproject.toml, by reading the sources with `ast`: nothing is imported."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.layers import module_name, read_layers
from tools.structure import (
    circles,
    imported_names,
    imports_between,
    mutual_folders,
    parse,
    read_sources,
)

ROOT = Path(__file__).parents[1]
SOURCES = read_sources(ROOT)
LAYERS = read_layers(ROOT)

# These lists may only get shorter.
KNOWN_PAIRS = {
    ("vllm", "vllm/env"),
    ("vllm/engine", "vllm/engine/process"),
    ("vllm/executor", "vllm/executor/ray"),
    ("vllm/ops", "vllm/ops/native"),
}
# External package -> the only parts of the tree that may import it: a file or a package.
CONFINED = {
    "habana_frameworks": {"platforms/habana/real.py"},
    "pyhlml": {"platforms/habana/telemetry.py"},
    "gaudi_sim": {"platforms/hpu.py"},
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
        "planning",
        "platforms",
        "sample",
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
        "model_executor/models/transformers_model.py",  # runs modules of transformers
        "config/arch/config_object.py",  # makes a config of transformers for programs
        # These files import it only for types:
        *("reasoning/parsers.py", "structured_output/compiler.py"),
        "structured_output/backends/vocabulary.py",
    },
    "pickle": {"model_executor/loader/checkpoint.py"},  # for the name of an error class
}


# Not when this module is imported, as every test process does: it takes seconds.
@functools.cache
def trees() -> dict[str, list[ast.AST]]:
    return {name: parse(source) for name, source in SOURCES.items()}


@functools.cache
def imports() -> dict[str, set[str]]:
    return imports_between(trees())


@pytest.fixture(autouse=True, scope="module")
def trees_are_forgotten() -> Iterator[None]:
    """Delete the syntax trees after these tests.

    They are a million objects, which would slow down every later garbage collection.
    """
    yield
    trees.cache_clear()


def test_every_file_has_a_layer():
    for container, layers in LAYERS.items():
        folder = container.replace(".", "/")
        inside = [name for name in SOURCES if name.startswith(f"{folder}/")]
        without = [name for name in inside if layers.module_of(module_name(name)) is None]
        faces = {f"{folder}/__init__.py", "vllm/entrypoints/openai/__init__.py"}
        assert set(without) <= faces, f"give these a layer in pyproject.toml: {without}"


@pytest.mark.parametrize("container", LAYERS)
def test_imports_point_down(container):
    assert wrong_imports(container, imports()) == []


def wrong_imports(container, arrows):
    return [
        f"{name} may not import {target}"
        for name, targets in arrows.items()
        for target in sorted(targets)
        if not LAYERS[container].allows(module_name(name), module_name(target))
    ]


def test_the_names_that_the_package_offers_are_for_programs():
    users = {name for name, targets in imports().items() if "vllm/__init__.py" in targets}
    assert {name for name in users if not name.startswith("vllm/entrypoints/")} == set()


def test_folders_do_not_import_each_other():
    pairs = set(mutual_folders(imports()))
    assert pairs - KNOWN_PAIRS == set(), "these import each other"
    assert KNOWN_PAIRS - pairs == set(), "these no longer do: take them out of KNOWN_PAIRS"


def test_files_do_not_import_each_other():
    assert circles(imports()) == []


@pytest.mark.parametrize("external", CONFINED)
def test_external_packages_stay_where_they_belong(external):
    wrong = []
    for name, nodes in trees().items():
        file = name.removeprefix("vllm/")
        if {file, file.partition("/")[0].removesuffix(".py")} & CONFINED[external]:
            continue
        wrong += [
            f"{name}:{line}: only {sorted(CONFINED[external])} may import {external}"
            for line, imported in imported_names(name, nodes)
            if imported.partition(".")[0] == external
        ]
    assert not wrong, "\n".join(wrong)


def test_the_simulated_card_imports_the_ground_only():
    allowed = {*LAYERS["vllm"].layers[-1].modules, "vllm.platforms"}
    wrong = [
        f"{name}:{line}: {imported}"
        for name, source in read_sources(ROOT, "gaudi_sim").items()
        for line, imported in imported_names(name, parse(source))
        if imported.startswith(("vllm.", "habana_frameworks"))
        and LAYERS["vllm"].module_of(imported) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_only_envs_reads_the_environment():
    readers = {name for name, source in SOURCES.items() if reads_environment(source)}
    assert readers == {"vllm/envs.py"}


def reads_environment(source: str) -> bool:
    """Return whether `os.environ`, `os.getenv` or `os.putenv` is named outside of a docstring."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if not any(name in source for name in names):  # to parse takes a hundred times as long
        return False
    for node in parse(source):
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


UPWARD = {
    "vllm/core/x.py": """
def f():
    from vllm.worker import y
from ..engine import y
""",
    "vllm/ops/x.py": """
if TYPE_CHECKING:
    from vllm.worker.y import z
""",
    "vllm/entrypoints/shared/x.py": "from vllm.entrypoints.openai.chat import turn",
    "vllm/entrypoints/pages/x.py": "from vllm.entrypoints.batch import y",
    "vllm/entrypoints/server/x.py": "from vllm.entrypoints.shared import y\nfrom vllm import envs",
    "vllm/envs.py": "from vllm import logger",
    **dict.fromkeys(
        (
            *("vllm/worker/y.py", "vllm/engine/y.py", "vllm/logger.py"),
            *("vllm/entrypoints/openai/chat/turn.py", "vllm/entrypoints/batch/y.py"),
            "vllm/entrypoints/shared/y.py",
        ),
        "",
    ),
}


def test_an_upward_import_is_recognised():
    arrows = imports_between({name: parse(source) for name, source in UPWARD.items()})
    assert wrong_imports("vllm", arrows) == [
        "vllm/core/x.py may not import vllm/engine/y.py",
        "vllm/core/x.py may not import vllm/worker/y.py",
        "vllm/ops/x.py may not import vllm/worker/y.py",
    ]
    assert wrong_imports("vllm.entrypoints", arrows) == [
        "vllm/entrypoints/shared/x.py may not import vllm/entrypoints/openai/chat/turn.py",
        "vllm/entrypoints/pages/x.py may not import vllm/entrypoints/batch/y.py",
    ]


PRIVATE_NAME = re.compile(
    r"(?<!self)(?<!cls)\.(_[A-Za-z]\w*)"  # of an object
    r"|attr\(\s*(?!self\b)[^,()]+,\s*\"(_[A-Za-z]\w*)"  # named to getattr, hasattr or setattr
    r"|^from [\w.]+ import (?:.*|\([^)]*)\b(_[A-Za-z]\w*)",  # imported
    re.MULTILINE,
)
KNOWING = ("reach.py", Path(__file__).name)
OF_OTHERS = {
    *("_asdict", "_exit", "_replace", "_run_exitfuncs", "_shutdown"),
    *("_actions", "_option_string_actions", "_SubParsersAction"),  # of argparse
    *("_dynamo", "_forward_pre_hooks", "_fsdp_wrapped_module", "_orig_mod", "_python_dispatch"),
    *("_checkpoint_wrapped_module", "_get_privateuse1_backend_name", "_inductor", "_internal"),
    *("_C", "_pytree", "_subclasses", "_unsafe_view", "_utils"),  # of torch
    "_setup_privateuseone_for_python_backend",  # of torch
    *("_attn_implementation", "_mapping", "_retrieve_segment"),  # of transformers
    *("_data_ptr", "_get_device_type"),  # of the Habana bridge
    "_messages",  # of anthropic
    "_weight_scale",  # of tensors in checkpoints of torchao
}


def private_names(source: str) -> list[str]:
    """Return the private names of other modules that a test uses, once for each use."""
    found = [name for match in PRIVATE_NAME.findall(source) for name in match if name]
    return [name for name in found if name not in OF_OTHERS]


def test_no_test_uses_private_names():
    uses = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name not in KNOWING
        for name in private_names(path.read_text())
    ]
    assert uses == [], "test what users or other modules see, or use a function of tests/reach.py"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("core._wait(self._left)", ["_wait"]),
        ('patch.setattr(core, "_wait", None)', ["_wait"]),
        ('patch.setattr(\n    core, "_wait", None\n)', ["_wait"]),
        ('patch.setattr("vllm.x._wait", None)', ["_wait"]),
        ("from vllm.x import y, _z", ["_z"]),
        ("from vllm.x import (\n    y,\n    _z,\n)", ["_z"]),
        ('getattr(self, "_left")', []),
        ("row._replace(a=1)", []),
    ],
)
def test_private_names_are_recognised(source, expected):
    assert private_names(source) == expected
