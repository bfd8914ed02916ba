"""Test Dockerfile.cpu, and the wheel that runs on a machine without a compiler."""

import json
import re
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.docker.dockerfile import IgnoreFile, base_image, parse, read_pairs
from tests.docker.image_build import Builder, write_full_wheel, write_wheel
from tests.docker.requirements import read_file, with_dependencies
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.ops.cpu.operators import load_cpu_kernels

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = parse((ROOT / "Dockerfile.cpu").read_text())
APT_GET = """#!/bin/sh
# Stands for apt-get: the g++ that it installs writes an empty file.
case "$*" in *g++*) ;; *) exit 0 ;; esac
cat > "$(dirname "$0")/c++" <<'END'
#!/bin/sh
for word; do if [ "$last" = -o ]; then : > "$word"; fi; last=$word; done
END
chmod +x "$(dirname "$0")/c++"
"""


def text_of(name: str) -> str:
    """Return the text of the last instruction of that name."""
    return [i.text for i in INSTRUCTIONS if i.name == name][-1]


def test_the_image_begins_with_a_slim_python_or_an_image_of_ones_own():
    assert base_image(INSTRUCTIONS, {}) == "python:3.12-slim-bookworm"
    assert base_image(INSTRUCTIONS, {"BASE_IMAGE": "mirror/python:3.11"}) == "mirror/python:3.11"


def test_the_torch_of_the_image_is_the_one_of_make():
    (of_make,) = re.findall(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    arguments = dict(i.text.split("=", 1) for i in INSTRUCTIONS if i.name == "ARG")
    assert arguments["TORCH"] == of_make


def test_what_is_copied_exists_and_is_not_ignored():
    ignored = IgnoreFile((ROOT / ".dockerignore").read_text())
    sources = [s for i in INSTRUCTIONS if i.name == "COPY" for s in i.text.split()[:-1]]
    assert "requirements-cpu.txt" in sources
    assert not [s for s in sources if not (ROOT / s).exists() or ignored.excludes(s)]


def test_the_container_serves_as_a_user_without_rights_and_is_asked_for_its_health():
    assert text_of("USER") == "1001:0"
    assert json.loads(text_of("ENTRYPOINT")) == ["sh", "/opt/vllm/image_entrypoint.sh"]
    assert json.loads(text_of("CMD")) == ["serve"]
    assert text_of("EXPOSE") == str(ServerArgs().port)
    command = json.loads(text_of("HEALTHCHECK").partition("CMD ")[2])
    assert command[:2] == ["python3", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    assert f":{ServerArgs().port}/livez" in command[2]
    assert read_pairs(text_of("ENV"), {})["VLLM_TARGET_DEVICE"] == "cpu"


@pytest.mark.slow
@pytest.mark.exhaustive  # exhaustive: the tests above read the Dockerfile in every run
def test_the_steps_of_the_file_make_an_image(tmp_path):
    """The packages contain only metadata, and apt-get installs a fake compiler."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for package in with_dependencies(read_file(ROOT / "requirements-cpu.txt")).values():
        name, version = package.metadata["Name"], package.version
        write_wheel(name, version, package.read_text("METADATA"), packages)
    metadata = "Metadata-Version: 2.1\nName: triton\nVersion: 3.6.0\n"
    write_wheel("triton", "3.6.0", metadata, packages)
    write_full_wheel(distribution("setuptools"), packages)
    base = tmp_path / "base"
    venv.create(base / "usr", with_pip=True, symlinks=True)
    (base / "usr" / "bin" / "apt-get").write_text(APT_GET)
    (base / "usr" / "bin" / "apt-get").chmod(0o755)
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(packages),
        "PIP_CONFIG_FILE": "/dev/null",
    }

    (tmp_path / "image").mkdir()
    image = Builder(ROOT, base, tmp_path / "image", settings).build(ROOT / "Dockerfile.cpu")

    assert image.user == "1001:0"
    done = image.run_entrypoint(["--help"])
    assert (done.returncode, image.command) == (0, ["serve"])
    assert "generate" in done.stdout
    done = image.run("python3 -m pip check")
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines and all("requires triton, which is not installed" in line for line in lines)
    assert list(image.root.glob("usr/**/vllm/ops/_cpu_kernels.so"))
    assert list(image.root.glob("usr/**/vllm/assets/models/*/model.safetensors"))
    assert not (image.root / "src").exists()
    assert Path(image.moved(image.env["HOME"])).stat().st_mode & 0o070 == 0o070


@pytest.mark.slow
# Exhaustive: tests/ops/test_build.py tests in every run how the kernels are built or refused.
@pytest.mark.exhaustive
@pytest.mark.skipif(load_cpu_kernels() is None, reason="the C++ kernels are not built")
def test_the_wheel_generates_text_where_there_is_no_compiler(tmp_path):
    """The wheel is installed into a new environment, which takes all other packages from this
    one.
    """
    command = ["make", "wheel", f"PYTHON={sys.executable}", f"WHEELS={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(str(Path(pytest.__file__).parents[1]))
    (tmp_path / "bin").mkdir()
    settings = {"PATH": f"{environment}/bin:{tmp_path}/bin", "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        command = [str(environment / "bin" / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("pip", "install", "--no-index", "--no-deps", "--force-reinstall", str(wheel))
    where = run("python", "-c", "import vllm, shutil; print(vllm.__file__, shutil.which('c++'))")
    assert where == f"{packages}/vllm/__init__.py None\n"
    facts = run("vllm", "collect-env")
    (kernels,) = re.findall(r"^CPU kernels: +(.*)", facts, re.MULTILINE)
    assert load_cpu_kernels().isa in kernels
    text = run("vllm", "generate", "--prompt", "import os", "--max-tokens", "4")
    assert "import os" in text
