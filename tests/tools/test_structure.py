"""Test the report about the structure, with a small tree."""

import json
import subprocess
import sys

import pytest

from tools.structure import MAX_ROOM_FILES, ROOT, circles, measure, table

FILES = {
    "vllm/__init__.py": '"""The package."""\n',
    "vllm/a/__init__.py": "",
    "vllm/a/one.py": (
        '"""One,\n\nhqq lines."""\n'
        "import typing\n"
        "from vllm.b.two import x\n"
        "if typing.TYPE_CHECKING:\n"
        "    from vllm.a import three\n"
        "\n"
        "# A comment.\n"
        "y = 1  # code\n"
        "min_p = 3\n"
    ),
    "vllm/a/three.py": "from . import one\nz = 'text'\n",
    "vllm/b/__init__.py": "",
    "vllm/b/two.py": "def x():\n    import vllm.a.three\n\n    return 1\n\n\nasync def w(): ...\n",
    "vllm/b/page.js": "// min_p\n",
    "csrc/x.h": "// kMinP and Mxfp4\n",
    "csrc/x.txt": "min_p\n",
    **{f"vllm/big/f{i}.py": "" for i in range(MAX_ROOM_FILES + 1)},
    **{f"vllm/small/f{i}.py": "" for i in range(MAX_ROOM_FILES)},
    "vllm/small/__init__.py": "",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for name, source in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def test_the_figures_of_a_tree(tree):
    report = measure(tree)
    assert report.files == sum(name.endswith(".py") for name in FILES)
    assert report.lines == {"docstrings": 4, "code": 6 + 2 + 4, "comments": 1, "blank": 1 + 3}
    assert report.crowded == {"vllm/big": MAX_ROOM_FILES + 1}
    assert report.mutual == [("vllm/a", "vllm/b")]
    assert report.circles == [["vllm/a/one.py", "vllm/a/three.py", "vllm/b/two.py"]]
    assert report.function_lines == (2.5, 4)
    assert [(each.name, each.lines) for each in report.largest_functions] == [
        ("vllm/b/two.py:x", 4),
        ("vllm/b/two.py:w", 1),
    ]
    assert (report.largest_files[0].name, report.largest_files[0].lines) == ("vllm/a/one.py", 11)
    assert report.traces["a sampling parameter"] == ["vllm/a/one.py", "vllm/b/page.js", "csrc/x.h"]
    assert report.traces["a kind of quantized values"] == ["csrc/x.h"]
    assert report.traces["a quantization format"] == []  # it is in a docstring
    text = "\n".join(table(report))
    assert "3: vllm/a/one.py, vllm/a/three.py, vllm/b/two.py" in text
    assert "a sampling parameter: 3 files in 3 folders" in text


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("", []),
        ("ab bc", []),
        ("aa", []),
        ("ab ba", ["ab"]),
        ("ab bc ca cd", ["abc"]),
        ("xa ab ba bc cd dc dy", ["ab", "cd"]),
        ("ab bc ca de ed", ["abc", "de"]),
    ],
)
def test_circles(imports, expected):
    arrows = {name: set() for name in "abcdexy"}
    for start, end in imports.split():
        arrows[start].add(end)
    assert ["".join(group) for group in circles(arrows)] == expected


def test_the_command_writes_json(tree):
    command = [sys.executable, str(ROOT / "tools" / "structure.py"), "--root", str(tree), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["crowded"] == {"vllm/big": MAX_ROOM_FILES + 1}
