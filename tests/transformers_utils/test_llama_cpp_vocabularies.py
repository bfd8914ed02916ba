"""Test token ids of the vocabularies that llama.cpp publishes with texts and their expected ids.

The files are in the source archive of llama-cpp-python, which is downloaded and not built.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from vllm.transformers_utils.gguf.header import read_header
from vllm.transformers_utils.gguf.model import GGUFModel
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files

pytestmark = pytest.mark.exhaustive

_PREFIX = "ggml-vocab-"


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    """Return the folder with the vocabulary files of the archive."""
    folder = tmp_path_factory.mktemp("vocabularies")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
    done = subprocess.run(
        [*command, "--no-binary", "llama-cpp-python", "llama-cpp-python"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"the archive of llama-cpp-python cannot be downloaded: {done.stderr[-300:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        for member in files:
            name = Path(member.name).name
            if name.startswith(_PREFIX) and member.isfile():
                (folder / name).write_bytes(files.extractfile(member).read())
    archive.unlink()
    return folder


def test_ids_are_those_that_are_expected(vocabularies):
    num_lines = {}
    for inputs in sorted(vocabularies.glob("*.inp")):
        path = inputs.with_suffix("")
        name = path.stem.removeprefix(_PREFIX)
        files = tokenizer_files(GGUFModel((path,), read_header(path).metadata, {}))
        tokenizer = Tokenizer.from_str(files["tokenizer.json"])
        texts = inputs.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        wanted = path.with_name(path.name + ".out").read_text().splitlines()
        for text, want in zip(texts, wanted, strict=False):  # the last text has no expected ids
            got = tokenizer.encode(text, add_special_tokens=False).ids
            assert got == [int(each) for each in want.split()], (name, text)
        num_lines[name] = len(wanted)
    assert len(num_lines) >= 15 and min(num_lines.values()) >= 46
