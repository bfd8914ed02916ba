"""Test the content of the Dockerfiles, and the reader that the other image tests use."""

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
    read_stages,
    substitute,
    used_stages,
)
from vllm.entrypoints.cli import hpu_check
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.envs import Envs

ROOT = Path(__file__).parents[2]
UBUNTU = parse((ROOT / "Dockerfile.hpu").read_text())
RED_HAT = parse((ROOT / "Dockerfile.hpu.ubi").read_text())
BOTH = pytest.mark.parametrize("instructions", [UBUNTU, RED_HAT], ids=["ubuntu", "red hat"])

VAULT = "vault.habana.ai/gaudi-docker"

# Release of the Gaudi software -> operating system of each Dockerfile, and name of its image.
RELEASES = {
    "1.21.3": ("ubuntu22.04", "rhel9.4", "pytorch-installer-2.6.0"),
    "1.22.0": ("ubuntu22.04", "rhel9.4", "pytorch-installer-2.7.1"),
    "1.23.0": ("ubuntu24.04", "rhel9.4", "pytorch-installer-2.9.0"),
    "1.24.0": ("ubuntu24.04", "rhel9.6", "pytorch-installer-2.10.0"),
    "1.24.1": ("ubuntu24.04", "rhel9.6", "pytorch-upstream-installer-2.11.0"),
}


@pytest.mark.parametrize("index, instructions", [(0, UBUNTU), (1, RED_HAT)], ids=["ubuntu", "ubi"])
@pytest.mark.parametrize("release", [*RELEASES, None])
def test_one_argument_chooses_the_image_of_a_release(index, instructions, release):
    args = {} if release is None else {"GAUDI_VERSION": release}
    release = release or "1.24.1"
    *systems, name = RELEASES[release]
    image = f"{VAULT}/{release}/{systems[index]}/habanalabs/{name}"
    assert base_image(instructions, args) == f"{image}:latest"
    assert base_image(instructions, args | {"REVISION": "7"}) == f"{image}:7"


@BOTH
def test_an_image_of_ones_own_takes_the_place_of_the_vendors(instructions):
    args = {"BASE_IMAGE": "my.registry/gaudi:7"}
    assert base_image(instructions, args) == "my.registry/gaudi:7"


def test_the_self_test_of_a_card_names_the_image_that_is_the_default():
    assert base_image(UBUNTU, {}) == hpu_check.VENDOR_IMAGE


@BOTH
def test_a_release_has_pins_for_the_tests_of_its_torch(instructions):
    """`make test-vendor` runs the tests with this torch, without the image."""
    images = [stage.image for stage in read_stages(instructions, {})][:-2]
    assert len(images) == len(RELEASES)
    for image in images:
        torch_version = re.search(r"installer-([\d.]+):", image)[1]
        assert (ROOT / "tests" / "vendor" / f"torch-{torch_version}.txt").is_file()


def test_both_files_take_the_same_steps_except_for_the_user():
    ubuntu, red_hat = (
        [[(step.name, step.text) for step in stage.steps] for stage in read_stages(file, {})]
        for file in (UBUNTU, RED_HAT)
    )
    red_hat[-1].remove(("USER", "1001:0"))
    assert ubuntu == red_hat


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
        (["vllm", "serve", "a"], ["serve", "a"]),
        (["org/model", "--port", "1"], ["serve", "org/model", "--port", "1"]),
        (["/models/a"], ["serve", "/models/a"]),
        (["sh", "-c", "vllm generate --chat"], ["generate", "--chat"]),
        (["/bin/sh", "-c", "vllm serve"], ["serve"]),
        (["ray", "start", "--head"], ["ray", "start", "--head"]),
        (["pip", "list"], ["pip", "list"]),
    ],
)
def test_flags_alone_start_the_server_and_a_subcommand_is_run(tmp_path, arguments, command):
    """Check which command `docker run IMAGE ARGUMENTS` runs."""
    for name in ("vllm", "ray", "pip"):
        program = tmp_path / name
        first = "" if name == "vllm" else f"printf '%s\\n' {name}\n"
        program.write_text(f'#!/bin/sh\n{first}printf "%s\\n" "$@"\n')
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


def test_a_build_needs_the_stages_that_the_last_one_names():
    text = "ARG A=x\nFROM i/${A} AS x\nFROM i/y AS y\nFROM ${A} AS z\nRUN true\nFROM ${A}\n"
    mount = "RUN --mount=type=bind,from=z,source=/a,target=/b true\n"

    def used(text, **args):
        return [(s.image, s.name) for s in used_stages(read_stages(parse(text), args))]

    assert used(text) == [("i/x", "x"), ("x", "")]
    assert used(text, A="y") == [("i/y", "y"), ("y", "")]
    assert used(text + mount) == [("i/x", "x"), ("x", "z"), ("x", "")]
    assert base_image(parse(text), {"A": "y"}) == "i/y"


@pytest.mark.parametrize(
    "text, args, message",
    [
        ("ARG A=1\n", {}, "no FROM"),
        ("RUN true\nFROM x\n", {}, "line 1: RUN before FROM"),
        ("ARG A=1\nFROM x\nARG B=1\n", {"B": "2"}, "no ARG before FROM: B"),
        (
            "FROM x AS a\nFROM y\nRUN --mount=type=bind,from=a,source=/a,target=/b true\n",
            {},
            "2 images are pulled: x, y",
        ),
    ],
)
def test_a_file_without_one_base_image_is_an_error(text, args, message):
    with pytest.raises(DockerfileError, match=f"^{re.escape(message)}$"):
        base_image(parse(text), args)


def test_mounts_are_told_from_the_command():
    run = read_run(
        "--mount=type=cache,target=/a --mount=type=bind,from=w,source=/b,target=/b pip x"
    )
    assert run.command == "pip x"
    assert [mount["target"] for mount in run.mounts] == ["/a", "/b"]
    with pytest.raises(DockerfileError, match="unknown flag --network=none"):
        read_run("--network=none pip x")
