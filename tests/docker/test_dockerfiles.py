"""What the Dockerfiles say, and the reader that the other tests of images rest on."""

import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from tests.docker.dockerfile import (
    DockerfileError,
    IgnoreFile,
    base_image,
    parse,
    read_pairs,
    read_run,
    substitute,
)
from vllm.entrypoints.server.server_args import ServerArgs
from vllm.envs import Envs

ROOT = Path(__file__).parents[2]
UBUNTU = parse((ROOT / "Dockerfile.hpu").read_text())
RED_HAT = parse((ROOT / "Dockerfile.hpu.ubi").read_text())
BOTH = pytest.mark.parametrize("instructions", [UBUNTU, RED_HAT], ids=["ubuntu", "red hat"])

VAULT = "vault.habana.ai/gaudi-docker"
NEWER = {"GAUDI_VERSION": "1.22.0", "PYTORCH_VERSION": "2.7.1", "BASE_OS": "ubuntu24.04"}


@pytest.mark.parametrize(
    "instructions, args, image",
    [
        (UBUNTU, {}, f"{VAULT}/1.21.3/ubuntu22.04/habanalabs/pytorch-installer-2.6.0:latest"),
        (RED_HAT, {}, f"{VAULT}/1.21.3/rhel9.4/habanalabs/pytorch-installer-2.6.0:latest"),
        (UBUNTU, NEWER, f"{VAULT}/1.22.0/ubuntu24.04/habanalabs/pytorch-installer-2.7.1:latest"),
        (RED_HAT, {"BASE_IMAGE": "my.registry/gaudi:7"}, "my.registry/gaudi:7"),
    ],
)
def test_arguments_choose_the_image_of_the_vendor(instructions, args, image):
    assert base_image(instructions, args) == image


def test_both_files_take_the_same_steps_except_for_the_system_and_the_user():
    def steps(instructions):
        return [(i.name, i.text) for i in instructions]

    missing = [step for step in steps(UBUNTU) if step not in steps(RED_HAT)]
    added = [step for step in steps(RED_HAT) if step not in steps(UBUNTU)]
    assert missing == [("ARG", "BASE_OS=ubuntu22.04")]
    assert added == [("ARG", "BASE_OS=rhel9.4"), ("USER", "1001:0")]


@BOTH
def test_what_is_copied_is_there_and_not_ignored(instructions):
    ignored = IgnoreFile((ROOT / ".dockerignore").read_text())
    sources = [s for i in instructions if i.name == "COPY" for s in i.text.split()[:-1]]
    assert sources
    assert not [s for s in sources if not (ROOT / s).exists() or ignored.excludes(s)]


@BOTH
def test_the_variables_that_are_set_for_vllm_are_variables_of_vllm(instructions):
    names = [n for i in instructions if i.name == "ENV" for n in read_pairs(i.text, {})]
    ours = {name for name in names if name.startswith("VLLM_")}
    assert ours
    assert ours <= {field.name for field in fields(Envs)}


@BOTH
def test_every_pip_install_keeps_to_the_packages_of_the_vendor(instructions):
    """PIP_CONSTRAINT is set before the first install, and nothing replaces it later."""
    last_stage = instructions[max(n for n, i in enumerate(instructions) if i.name == "FROM") :]
    constrained = False
    for instruction in last_stage:
        if instruction.name == "ENV" and "PIP_CONSTRAINT" in instruction.text:
            assert not constrained
            constrained = True
        assert constrained or "pip install" not in instruction.text
    assert "vendor_packages.py check" in " ".join(i.text for i in last_stage)


@BOTH
def test_the_image_starts_with_the_entry_script_and_serves_by_default(instructions):
    started = {i.name: json.loads(i.text) for i in instructions if i.name in ("ENTRYPOINT", "CMD")}
    script = "/opt/vllm/image_entrypoint.sh"
    assert started == {"ENTRYPOINT": ["sh", script], "CMD": ["serve"]}


@pytest.mark.parametrize(
    "arguments, command",
    [
        ([], ["serve"]),
        (["--model", "a b", "--max-num-seqs=4"], ["serve", "--model", "a b", "--max-num-seqs=4"]),
        (["-tp", "1"], ["serve", "-tp", "1"]),
        (["serve", "--port", "1"], ["serve", "--port", "1"]),
        (["generate", "--prompt", "x"], ["generate", "--prompt", "x"]),
        (["hpu-check"], ["hpu-check"]),
        (["--help"], ["--help"]),
        (["--version"], ["--version"]),
    ],
)
def test_flags_alone_start_the_server_and_a_subcommand_is_run(tmp_path, arguments, command):
    """What `docker run IMAGE ARGUMENTS` comes to."""
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["sh", ROOT / "tools" / "image_entrypoint.sh", *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, command)


@BOTH
def test_the_port_that_is_exposed_is_the_one_that_is_asked_after_health(instructions):
    texts = {i.name: i.text for i in instructions if i.name in ("EXPOSE", "HEALTHCHECK")}
    assert texts["EXPOSE"] == str(ServerArgs().port)
    command = json.loads(texts["HEALTHCHECK"].partition("CMD ")[2])
    assert command[:2] == ["python3", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    assert f":{ServerArgs().port}/livez" in command[2]


@pytest.mark.parametrize(
    "path, is_excluded",
    [
        ("vllm/engine/engine_core.py", False),
        ("vllm/assets/models/stdlib-llama-5m/model.safetensors", False),
        ("csrc/cpu/norm.h", False),
        ("tools/vendor_packages.py", False),
        ("tools/image_entrypoint.sh", False),
        ("tools/generate_docs.py", True),
        ("vllm/ops/_cpu_kernels.so", True),
        ("vllm/engine/__pycache__/engine_core.cpython-311.pyc", True),
        (".git/config", True),
        (".venv/bin/python", True),
        ("tests/docker/dockerfile.py", True),
        ("model/model.safetensors", True),
    ],
)
def test_only_what_the_image_needs_reaches_the_builder(path, is_excluded):
    assert IgnoreFile((ROOT / ".dockerignore").read_text()).excludes(path) is is_excluded


def test_the_reader_joins_continued_lines_and_leaves_out_comments():
    (run,) = parse("# a comment\n\nRUN one \\\n    # between\n    two\n")
    assert (run.line, run.name, run.text) == (3, "RUN", "one two")


@pytest.mark.parametrize(
    "text, message",
    [
        ("STOPSIGNAL 9", "line 1: unknown instruction 'STOPSIGNAL'"),
        ("FROM x\nrun true", "line 2: unknown instruction 'run'"),
        ("RUN true \\", "line 1: continued after the end of the file"),
        ("RUN true \\\n\n  false", "line 2: empty, inside an instruction"),
        ("ENV", "line 1: ENV of nothing"),
        ("RUN cat <<EOF", "line 1: here-documents are not used here"),
    ],
)
def test_what_the_reader_does_not_know_is_an_error(text, message):
    with pytest.raises(DockerfileError, match=f"^{re.escape(message)}$"):
        parse(text)


def test_an_undeclared_variable_is_an_error():
    assert substitute("a${B}c$D", {"B": "1", "D": "2"}) == "a1c2"
    with pytest.raises(DockerfileError, match=r"^B is not declared in 'a\$B'$"):
        substitute("a$B", {})


def test_mounts_are_told_from_the_command():
    run = read_run(
        "--mount=type=cache,target=/a --mount=type=bind,from=w,source=/b,target=/b pip x"
    )
    assert run.command == "pip x"
    assert [mount["target"] for mount in run.mounts] == ["/a", "/b"]
    with pytest.raises(DockerfileError, match="unknown flag --network=none"):
        read_run("--network=none pip x")
