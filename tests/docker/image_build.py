"""Build an image without a container engine.

A folder represents the file system of a stage. A virtual environment in it represents the Python of
the vendor's image, with a torch of which only the metadata exist. RUN steps are executed, with the
paths of the image moved into the folder. pip is executed too: it resolves and installs wheels that
contain only the metadata of the packages of this environment, so the network is not used.
"""

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path

from tests.docker.dockerfile import (
    DockerfileError,
    IgnoreFile,
    Instruction,
    Run,
    Stage,
    parse,
    read_pairs,
    read_run,
    read_stages,
    substitute,
    used_stages,
)

_PLACES = re.compile(r"(?<![\w.}/])/(?:home|opt|root|src|wheels)(?=[/\s]|$)")
_ABSOLUTE = re.compile(r"(?<![\w.}*/])/\w+")


@dataclass
class Image:
    """The state of a stage while it is built."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def moved(self, text: str) -> str:
        """Replace absolute paths of the image by paths of this machine.

        Raises:
            DockerfileError: a path is outside of the folders that our images may use.
        """
        rest = _PLACES.sub("place", text)
        if found := _ABSOLUTE.search(rest):
            raise DockerfileError(f"unexpected path {found[0]} in {text!r}")
        return _PLACES.sub(lambda match: f"{self.root}{match[0]}", text)

    def run(self, command: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run a shell command inside the image; never raises."""
        return subprocess.run(
            ["/bin/sh", "-c", self.moved(command)],
            cwd=self.moved(self.workdir),
            env={
                "PATH": f"{self.root}/usr/bin:/usr/bin:/bin",
                "HOME": f"{self.root}/root",
                **{name: self.moved(value) for name, value in self.env.items()},
                **self.args,
                **env,
            },
            capture_output=True,
            text=True,
        )

    def run_entrypoint(self, arguments: Iterable[str]) -> "subprocess.CompletedProcess[str]":
        """Run the entry point as `docker run IMAGE ARGUMENTS` does."""
        return self.run(" ".join([*self.entrypoint, *arguments]))


class Builder:
    """Executes a Dockerfile.

    Args:
        context: the checkout.
        base: a folder that replaces the image that is pulled; it is copied.
        folder: folder in which each stage gets a folder.
        env: further variables of every RUN step: where pip finds packages.
    """

    def __init__(self, context: Path, base: Path, folder: Path, env: Mapping[str, str]) -> None:
        self._context = context
        self._ignored = IgnoreFile((context / ".dockerignore").read_text())
        self._base = base
        self._folder = folder
        self._env = dict(env)
        self._stages: dict[str, Image] = {}
        self._image = Image(folder)

    def build(self, dockerfile: Path) -> Image:
        """Build the last stage and return it.

        Raises:
            DockerfileError: a step is not understood, or fails; contains the output of the step.
        """
        for stage in used_stages(read_stages(parse(dockerfile.read_text()), {})):
            self._start_stage(stage)
            for step in stage.steps:
                try:
                    self._carry_out(step)
                except DockerfileError as error:
                    raise DockerfileError(f"{dockerfile.name}:{step.line}: {error}") from None
        return self._image

    def _carry_out(self, instruction: Instruction) -> None:
        image, text = self._image, instruction.text
        match instruction.name:
            case "ARG":
                name, _, default = text.partition("=")
                image.args[name] = substitute(default, image.args)
            case "ENV":
                image.env |= read_pairs(text, {**image.args, **image.env})
            case "LABEL":
                read_pairs(text, {**image.args, **image.env})
            case "WORKDIR":
                if not text.startswith("/"):
                    raise DockerfileError(f"WORKDIR {text} is not absolute")
                image.workdir = text
                Path(image.moved(text)).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = text
            case "COPY":
                self._copy(*text.split())
            case "RUN":
                self._run(read_run(text))
            case "ENTRYPOINT":
                image.entrypoint = json.loads(text)
            case "CMD":
                image.command = json.loads(text)

    def _start_stage(self, stage: Stage) -> None:
        before = self._stages.get(stage.image)
        name = stage.name or "last"
        root = self._folder / name
        shutil.copytree(before.root if before else self._base, root, symlinks=True)
        self._image = self._stages[name] = Image(root, dict(before.env) if before else {})

    def _copy(self, *paths: str) -> None:
        *sources, target = paths
        folder = Path(self._image.moved(self._image.workdir)) / target
        for source in sources:
            files = [f for f in self._files(source) if not self._ignored.excludes(f)]
            if not files:
                raise DockerfileError(f"COPY of {source}: not there, or in .dockerignore")
            for file in files:
                # COPY copies the content of a folder, but a file with its name.
                inside = Path(file).relative_to(source) if file != source else Path(file).name
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self._context / file, folder / inside)

    def _files(self, source: str) -> list[str]:
        path = self._context / source
        found = path.rglob("*") if path.is_dir() else [path]
        return sorted(str(f.relative_to(self._context)) for f in found if f.is_file())

    def _run(self, run: Run) -> None:
        links = [self._mount(mount) for mount in run.mounts]
        done = self._image.run(run.command, **self._env)
        for link in filter(None, links):
            link.unlink()
        if done.returncode:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise DockerfileError(f"exit code {done.returncode} of {run.command}\n{said}")

    def _mount(self, mount: Mapping[str, str]) -> Path | None:
        """Return the link that replaces a mount; None for a cache, which is not replaced."""
        target = Path(self._image.moved(mount["target"]))
        target.parent.mkdir(parents=True, exist_ok=True)
        if mount == {"type": "cache", "target": mount["target"]}:
            target.mkdir(exist_ok=True)
            return None
        if mount.keys() != {"type", "from", "source", "target"} or mount["type"] != "bind":
            raise DockerfileError(f"unknown mount {dict(mount)}")
        stage = self._stages[mount["from"]]
        os.symlink(stage.moved(mount["source"]), target)
        return target


def write_wheel(name: str, version: str, metadata: str, folder: Path) -> None:
    """Write a wheel that contains only its metadata."""
    stem = f"{re.sub('[-_.]+', '_', name)}-{version}"
    info = f"{stem}.dist-info"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")


def write_full_wheel(distribution: Distribution, folder: Path) -> None:
    """Write a wheel with all the files of an installed pure package."""
    stem = f"{distribution.metadata['Name']}-{distribution.version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                wheel.write(distribution.locate_file(file), str(file))


def write_vendor_package(name: str, version: str, site_packages: Path, source: str = "") -> None:
    """Write a package of the vendor's image: its metadata, and a module with the code `source`."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/INSTALLER": "pip\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    for file, content in files.items():
        (site_packages / file).parent.mkdir(exist_ok=True)
        (site_packages / file).write_text(content)
