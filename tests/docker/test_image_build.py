"""Test executing the Dockerfiles; image_build.py describes how it replaces a container engine."""

import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.docker.dockerfile import DockerfileError, parse, read_stages, used_stages
from tests.docker.image_build import (
    Builder,
    Image,
    write_full_wheel,
    write_vendor_package,
    write_wheel,
)
from tests.docker.requirements import read_file, with_dependencies
from tests.exhaustive import exhaustive

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRITON = {"2.6.0+hpu.1.21.3.57.gitabc": "3.2.0", "2.11.0+cpu": "3.6.0"}
"""The torch of two images, a build of the vendor and one of PyTorch, and the triton that fits."""
# Images are built on machines without a card, and torch of the vendor looks for one when it is
# imported.
FAILS = "raise ImportError('torch was imported while the image is built')\n"
WANTS_TORCH = """Metadata-Version: 2.1
Name: wants_torch
Version: 1
Requires-Dist: torch>=2.13
"""


@pytest.fixture(scope="module")
def package_folder(tmp_path_factory) -> Path:
    """Make a folder with the packages that the image finds on its package index."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in with_dependencies(read_file(ROOT / "requirements-hpu.txt")).values():
        text = package.read_text("METADATA")
        write_wheel(package.metadata["Name"], package.version, text, folder)
    write_full_wheel(distribution("setuptools"), folder)
    write_wheel("torch", "2.13.0", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n", folder)
    write_wheel("wants_torch", "1", WANTS_TORCH, folder)
    for version in ("3.1.0", "3.2.0", "3.6.0", "3.8.0"):
        text = f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n"
        write_wheel("triton", version, text, folder)
    return folder


@pytest.fixture(
    scope="module",
    # Exhaustive: test_dockerfiles.py and test_requirements.py read all Dockerfiles in every run.
    params=[exhaustive(name) for name in TRITON],
)
def torch_version(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(tmp_path_factory, torch_version) -> Path:
    """Make the image of the vendor."""
    root = tmp_path_factory.mktemp("base")
    venv.create(root / "usr", with_pip=True, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = root / "usr" / "lib" / version / "site-packages"
    write_vendor_package("torch", torch_version, packages, FAILS)
    write_vendor_package("habana_torch_plugin", "1.21.3.57", packages)
    return root


@pytest.fixture(scope="module")
def pip_settings(package_folder) -> dict[str, str]:
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(package_folder),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_COMPILE": "1",
        "CXX": "no-compiler",  # tests/ops tests how the kernels are built
    }


def steps_of(dockerfile: str) -> tuple[tuple[str, str], ...]:
    """Return the steps of a file that `Builder` executes; one folder represents its base image."""
    stages = used_stages(read_stages(parse((ROOT / dockerfile).read_text()), {}))
    steps = [step for stage in stages for step in stage.steps]
    return tuple((step.name, step.text) for step in steps if step.name != "USER")


DIFFERENT_BUILDS = {steps_of(name): name for name in ("Dockerfile.hpu.ubi", "Dockerfile.hpu")}
"""One file of each group with the same steps: it is built once for all of them."""


@pytest.fixture(scope="module", params=DIFFERENT_BUILDS.values())
def dockerfile(request) -> Path:
    return ROOT / request.param


@pytest.fixture(scope="module")
def image(dockerfile, tmp_path_factory, base, pip_settings) -> Image:
    return Builder(ROOT, base, tmp_path_factory.mktemp("image"), pip_settings).build(dockerfile)


def installed_version(image: Image, package: str) -> str:
    code = f"from importlib.metadata import version; print(version('{package}'))"
    return image.run(f'python3 -c "{code}"').stdout.strip()


def test_the_torch_of_the_image_is_still_there(image, torch_version):
    assert installed_version(image, "torch") == torch_version


def test_the_triton_that_comes_with_a_package_fits_that_torch(image, torch_version):
    """xgrammar accepts any triton, so pip would install the newest."""
    assert installed_version(image, "triton") == TRITON[torch_version]


def test_ray_is_there_for_several_machines(image):
    assert installed_version(image, "ray")


def test_the_requirements_are_not_installed_without_the_constraints(base, pip_settings, tmp_path):
    for name in ("requirements-hpu.txt", "requirements-common.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = f"python3 -m pip install --dry-run -r {tmp_path}/requirements-hpu.txt"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        env={"PATH": f"{base}/usr/bin:/usr/bin:/bin", "HOME": str(tmp_path), **pip_settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "vendor-packages.txt" in done.stderr


def test_all_requirements_are_met(image):
    done = image.run("python3 -m pip check")
    assert (done.returncode, done.stdout) == (0, "No broken requirements found.\n")


def test_the_entry_point_knows_the_default_command(image):
    done = image.run_entrypoint(["--help"])
    assert done.returncode == 0
    assert "generate" in done.stdout
    assert image.command[0] in done.stdout


def test_the_package_is_imported_from_the_image_without_torch(image):
    done = image.run('python3 -c "import vllm; print(vllm.__file__)"')
    assert done.stdout.startswith(str(image.root))


def test_the_image_has_the_bundled_model_and_no_sources(image):
    assert list(image.root.glob("usr/**/vllm/assets/models/*/model.safetensors"))
    assert not (image.root / "src").exists()
    assert not list(image.root.rglob("kernels.cpp"))


def test_any_user_of_group_0_can_write_to_its_home(image):
    home = Path(image.moved(image.env["HOME"]))
    assert home.stat().st_mode & 0o070 == 0o070
    assert image.moved(image.workdir) == str(home)


def test_pip_refuses_to_replace_torch_in_the_finished_image(image, torch_version, pip_settings):
    done = image.run("python3 -m pip install wants_torch", **pip_settings)
    assert done.returncode != 0
    assert "The user requested (constraint) torch==" in done.stdout
    assert installed_version(image, "torch") == torch_version


def test_a_step_that_replaces_torch_all_the_same_is_found(
    image, torch_version, pip_settings, tmp_path
):
    changed = Image(tmp_path / "image", dict(image.env), dict(image.args))
    shutil.copytree(image.root, changed.root, symlinks=True)
    changed.env["PIP_CONSTRAINT"] = ""
    done = changed.run("python3 -m pip install torch==2.13.0", **pip_settings)
    assert done.returncode == 0
    check = "python3 /opt/vllm/vendor_packages.py check /opt/vllm/vendor-packages.txt"
    done = changed.run(check)
    assert done.returncode == 1
    # The installed torch may also be a build for only the CPU, whose version ends with +cpu.
    before = f"changed since the image: torch=={torch_version} is now 2.13.0"
    assert done.stderr in (f"{before}\n", f"{before}+cpu\n")
    assert image.run(check).returncode == 0


@pytest.mark.parametrize(
    "step, message",
    [
        ("RUN echo why && false", "Dockerfile:2: exit code 1 of echo why && false\nwhy"),
        ("COPY tests tests", "Dockerfile:2: COPY of tests: not there, or in .dockerignore"),
        ("COPY no-such-file .", "Dockerfile:2: COPY of no-such-file: not there"),
        ("RUN cp /etc/passwd /opt", "Dockerfile:2: unexpected path /etc in"),
    ],
)
def test_a_step_that_fails_stops_the_build_and_is_named(tmp_path, step, message):
    (tmp_path / "base").mkdir()
    (tmp_path / "Dockerfile").write_text(f"FROM base\n{step}\n")
    builder = Builder(ROOT, tmp_path / "base", tmp_path / "image", {})
    with pytest.raises(DockerfileError, match=f"^{re.escape(message)}"):
        builder.build(tmp_path / "Dockerfile")
