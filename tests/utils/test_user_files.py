"""Test that files which users write may begin with a mark of the byte order, as some editors of
Windows write it."""

import json
import re
from pathlib import Path

import pytest

import vllm
from vllm.config.quantization.inc import read_inc_config
from vllm.entrypoints.openai.chat.template_flag import load_chat_template
from vllm.lora.files import check_files

SOURCES = Path(vllm.__file__).parent
READS = re.compile(r'read_text\((encoding=)?"utf-8"\)|open\((?![^)]*"w)[^)]*encoding="utf-8"')
OWN_FILES = {"hpu_check/collectives.py", "cost_model/fitted.py"}
"""Modules that read only files of this package."""


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("quant.json", '{"mode": "MEASURE"}', lambda path: read_inc_config(str(path)).mode),
        (
            "adapter_config.json",
            json.dumps({"r": 8, "lora_alpha": 16}),
            lambda path: check_files(path.parent, 64).alpha,
        ),
        ("template.jinja", "{{ messages[0].content }}", lambda path: load_chat_template(str(path))),
    ],
)
def test_a_mark_of_the_byte_order_changes_nothing(name, content, read, tmp_path):
    path = tmp_path / name
    found = []
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(content, encoding=encoding)
        found.append(read(path))
    assert found[0] == found[1]


def test_no_module_reads_files_of_users_without_the_mark():
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if READS.search(path.read_text(encoding="utf-8"))
    }
    assert found <= OWN_FILES
