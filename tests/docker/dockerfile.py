"""A strict reader of the part of the Dockerfile language that our Dockerfiles use.

Everything that it does not know is an error and is never skipped. The language:
https://docs.docker.com/reference/dockerfile/
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

INSTRUCTIONS = {
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "RUN",
    "USER",
    "WORKDIR",
}


class DockerfileError(Exception):
    """The file is not valid, or uses something that this reader does not know."""


@dataclass(frozen=True)
class Instruction:
    line: int
    """Line in which the instruction begins; the first line is 1."""
    name: str
    text: str
    """The rest of the instruction, on one line, with its variables as they are written."""


@dataclass(frozen=True)
class Run:
    """A parsed RUN instruction."""

    mounts: tuple[Mapping[str, str], ...]
    command: str
    """For the shell."""


@dataclass(frozen=True)
class Stage:
    """A FROM instruction and the instructions up to the next one."""

    image: str
    """Base of the stage: an image, or the name of an earlier stage."""
    name: str
    """Empty: it has none."""
    steps: list[Instruction]


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile.

    Raises:
        DockerfileError: an instruction is unknown, empty or not in capitals, or the last line is to
            be continued.
    """
    instructions = []
    pending = ""
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#") or not stripped:
            if pending and not stripped:
                raise DockerfileError(f"line {number}: empty, inside an instruction")
            continue  # a comment line inside an instruction does not belong to it
        start = start if pending else number
        pending += stripped
        if pending.endswith("\\"):
            pending = f"{pending[:-1].rstrip()} "
            continue
        instructions.append(_instruction(start, pending))
        pending = ""
    if pending:
        raise DockerfileError(f"line {start}: continued after the end of the file")
    return instructions


def _instruction(line: int, text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    if name not in INSTRUCTIONS:
        raise DockerfileError(f"line {line}: unknown instruction {name!r}")
    if not rest.strip():
        raise DockerfileError(f"line {line}: {name} of nothing")
    if "<<" in rest:
        raise DockerfileError(f"line {line}: here-documents are not used here")
    return Instruction(line, name, rest.strip())


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Return `text` with the values of its variables.

    Raises:
        DockerfileError: a variable is not declared. Docker would use an empty value.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in variables:
            raise DockerfileError(f"{name} is not declared in {text!r}")
        return variables[name]

    return _VARIABLE.sub(value, text)


def read_pairs(text: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the NAME=value pairs of ENV and LABEL."""
    pairs = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise DockerfileError(f"{word!r} is no NAME=value")
        pairs[name] = substitute(value, variables)
    return pairs


def read_run(text: str) -> Run:
    """Return the mounts and the command of a RUN instruction in shell form."""
    mounts = []
    while text.startswith("--"):
        flag, _, text = text.partition(" ")
        if not flag.startswith("--mount="):
            raise DockerfileError(f"unknown flag {flag}")
        options = flag.removeprefix("--mount=").split(",")
        mounts.append(dict(option.split("=", 1) for option in options))
    return Run(tuple(mounts), text.strip())


def read_stages(instructions: Iterable[Instruction], args: Mapping[str, str]) -> list[Stage]:
    """Return the stages of a file that is built with `--build-arg` for each of `args`.

    Raises:
        DockerfileError: there is no stage, an instruction other than ARG comes before the first
            one, or `args` has a name that the file does not declare there.
    """
    variables: dict[str, str] = {}
    stages: list[Stage] = []
    for instruction in instructions:
        if instruction.name == "FROM":
            image, *alias = substitute(instruction.text, variables).split()
            stages.append(Stage(image, alias[1] if alias else "", []))
        elif stages:
            stages[-1].steps.append(instruction)
        elif instruction.name == "ARG":
            name, _, default = instruction.text.partition("=")
            variables[name] = args.get(name, substitute(default, variables))
        else:
            raise DockerfileError(f"line {instruction.line}: {instruction.name} before FROM")
    if not stages:
        raise DockerfileError("no FROM")
    if unknown := args.keys() - variables.keys():
        raise DockerfileError(f"no ARG before FROM: {', '.join(sorted(unknown))}")
    return stages


def used_stages(stages: Iterable[Stage]) -> list[Stage]:
    """Return the last stage and the stages that it needs; a build omits the others."""
    names: set[str] = set()
    used = []
    for stage in reversed(list(stages)):
        if not used or stage.name in names:
            used.append(stage)
            runs = [read_run(step.text) for step in stage.steps if step.name == "RUN"]
            names |= {mount["from"] for run in runs for mount in run.mounts if "from" in mount}
            names.add(stage.image)
    return used[::-1]


def base_image(instructions: Iterable[Instruction], args: Mapping[str, str]) -> str:
    """Return the only image that is pulled for a build with `--build-arg` for each of `args`.

    Raises:
        DockerfileError: there is none, or more than one.
    """
    used = used_stages(read_stages(instructions, args))
    images = {stage.image for stage in used} - {stage.name for stage in used}
    if len(images) != 1:
        raise DockerfileError(f"{len(images)} images are pulled: {', '.join(sorted(images))}")
    return images.pop()


class IgnoreFile:
    """A .dockerignore file: the paths of the checkout that a build does not see.

    The last pattern that matches a path or a folder above it decides; `!` includes it again.
    """

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        patterns = [line for line in lines if line and not line.startswith("#")]
        self._rules = [(_regex(p.removeprefix("!")), p.startswith("!")) for p in patterns]

    def excludes(self, path: str) -> bool:
        """Return whether the file at `path`, relative to the checkout, is left out."""
        names = [str(PurePosixPath(path)), *map(str, PurePosixPath(path).parents)]
        is_excluded = False
        for regex, lets_in in self._rules:
            if any(regex.fullmatch(name) for name in names):
                is_excluded = not lets_in
        return is_excluded


def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/?|\*|\?|\[[^]]+\])", pattern.strip("/"))
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(
            known.get(part, part if part.startswith("[") and part else re.escape(part))
            for part in parts
        )
    )
