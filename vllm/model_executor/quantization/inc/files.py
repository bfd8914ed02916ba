"""Measurement and scale files, in the layout of Intel Neural Compressor.

    <prefix>_hooks_maxabs_<rank>_<world>.json            largest absolute values
    <prefix>_hooks_maxabs_<METHOD>_<rank>_<world>.json   scales
    <prefix>_hooks_maxabs_<rank>_<world>_mod_list.json   names of the modules

For the library, each has a second file `.npz` with the same content. Only the JSON is read, since
the other is a pickled object. The name of a file for one rank may lack the numbers at its end.
Independent of layers and torch.
"""

import glob
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm.config.quantization.inc import read_json_object
from vllm.errors import ConfigError

FileMode = Literal["DynamicRange", "Scale"]

_PREFIX = "model."
"""Programs that wrap a model in modules of their own have it once more."""

_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
"""Limits of scales and of the values that they are computed from, so that these and their
reciprocals fit in float32."""
_IS_PART = "IsPart"
"""A key in addition to the library's, which does not read it."""


@dataclass
class Node:
    """The measurements of one module: one or more values for each of its inputs and outputs."""

    inputs: list[list[float]] = field(default_factory=list)
    outputs: list[list[float]] = field(default_factory=list)
    weight: list[float] | None = None


@dataclass
class Measurements:
    """The measurements or scales of a file."""

    path: Path
    nodes: dict[str, Node]
    is_part: bool = False
    """Whether the values were made for a rank that has only a part of the measured layers: its
    weights may be smaller."""

    def __post_init__(self) -> None:
        self._by_short_name = {_short(name): node for name, node in self.nodes.items()}

    def find(self, name: str) -> Node | None:
        """Return the values of a module; prefixes of names may differ between model and file."""
        return self._by_short_name.get(_short(name))


class AssumedMeasurements(Measurements):
    """Measurements for planning without a file: all largest values are 1.

    The memory of a model does not depend on its scales.

    Args:
        path: path of the missing file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, {})

    def find(self, name: str) -> Node | None:
        """Return the assumed values of a module."""
        return Node([[1.0]], [[1.0], [1.0]])


def _short(name: str) -> str:
    while name.startswith(_PREFIX):
        name = name.removeprefix(_PREFIX)
    return name


def file_path(prefix: str, rank: int, world_size: int, method: str | None = None) -> Path:
    """Return the path of a rank's JSON file: scales if a method is given, else measurements."""
    scales = "" if method is None else f"_{method.upper()}"
    return Path(f"{Path(prefix).expanduser()}_hooks_maxabs{scales}_{rank}_{world_size}.json")


def find_file(prefix: str, rank: int, world_size: int, method: str | None = None) -> Path | None:
    """Return the existing file of a rank; None if there is none."""
    path = file_path(prefix, rank, world_size, method)
    if path.is_file():
        return path
    short = path.with_name(path.name.removesuffix(f"_{rank}_{world_size}.json") + ".json")
    return short if world_size == 1 and short.is_file() else None


def missing_file(config_path: str, prefix: str, rank: int, world_size: int) -> ConfigError:
    """Create the error about a rank without measurements, with the files that exist instead."""
    path = file_path(prefix, rank, world_size)
    others = sorted(path.parent.glob(f"{Path(prefix).name}_hooks_maxabs_*_*.json"))
    sizes = sorted({found for other in others if (found := _world_size(other)) is not None})
    hint = _other_sizes(sizes, world_size) or _other_folder(config_path, path)
    return ConfigError(f"QUANT_CONFIG {config_path}: {path} does not exist. {hint}")


def _other_sizes(sizes: Sequence[int], wanted: int) -> str | None:
    """Say how to use files for these numbers of ranks with another number; None without any."""
    if not sizes:
        return None
    if wanted in sizes:
        return (
            f"There are files for other ranks of these {wanted}: copy the files of all ranks, or "
            f"measure the model again with `vllm calibrate`"
        )
    found = (
        f"There are files for {' and '.join(map(str, sizes))} ranks: run with "
        f"--tensor-parallel-size {sizes[0]}"
    )
    for size in sizes:
        step = "unify" if size > wanted else "expand"
        if max(size, wanted) % min(size, wanted) == 0:
            return (
                f"{found}, or make files for {wanted} with `vllm calibrate --step {step} "
                f"--{step}-ranks {wanted} --tensor-parallel-size {size}`"
            )
    return found


def _other_folder(config_path: str, path: Path) -> str:
    """Say where a file is that was moved together with the file of QUANT_CONFIG."""
    folder = Path(config_path).expanduser().parent
    prefix = path.name.partition("_hooks_maxabs_")[0]
    name = glob.escape(path.name)
    for moved in sorted((*folder.glob(name), *folder.glob(f"*/{name}"))):
        return f"There is {moved}: set dump_stats_path to {moved.parent / prefix}"
    return (
        "dump_stats_path of that file is the beginning of this path: change it if the files were "
        "moved, as into a container. If there are none, measure the model with `vllm calibrate`"
    )


def _world_size(path: Path) -> int | None:
    first, last = path.stem.split("_")[-2:]
    return int(last) if first.isdigit() and last.isdigit() else None


def read_file(path: Path, mode: FileMode) -> Measurements:
    """Read a JSON file of measurements or scales.

    Raises:
        ConfigError: it cannot be read, has the other kind of content, or a value is missing, not
            finite, or negative; scales must not be 0 either.
    """
    content = read_json_object(path, "the measurement file", "Measure the model again")
    if content.get("Mode", mode) != mode:
        raise ConfigError(f"{path}: Mode must be {mode!r}, got {content['Mode']!r}")
    nodes = content.get("Nodes")
    if not isinstance(nodes, Mapping) or not nodes:
        raise ConfigError(f"{path}: Nodes must be an object with the modules of the model")
    found = {}
    for name, node in nodes.items():
        if not isinstance(node, Mapping):
            raise ConfigError(f"{path}: Nodes.{name} must be an object")
        found[str(name)] = _read_node(path, f"Nodes.{name}", node, mode == "Scale")
    return Measurements(path, found, bool(content.get(_IS_PART, False)))


def _read_node(path: Path, key: str, node: Mapping[str, Any], is_scale: bool) -> Node:
    lists = {}
    for part in ("inputs", "outputs"):
        entries = node.get(part) or []
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: {key}.{part} must be a list")
        # Scales of outputs are not used, and the library writes 0 and very small values for them.
        is_used = part == "inputs"
        lists[part] = [
            _numbers(path, f"{key}.{part}[{index}]", entry, is_scale and is_used, is_used)
            for index, entry in enumerate(entries)
        ]
    params = node.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"{path}: {key}.params must be an object")
    weight = params.get("weight")
    if isinstance(weight, Mapping):  # "0": scales of outputs, "1": scales of inputs (not used)
        weight = weight.get("0", weight.get(0))
    numbers = None
    if weight is not None:
        numbers = _numbers(path, f"{key}.params.weight", weight, is_scale)
    return Node(lists["inputs"], lists["outputs"], numbers)


def _numbers(path: Path, key: str, value: Any, is_scale: bool, is_used: bool = True) -> list[float]:
    flat: list[float] = []
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, list):
            stack.extend(reversed(each))
        elif isinstance(each, (int, float)) and not isinstance(each, bool):
            is_beyond = (
                isinstance(each, int) and abs(each) > _LARGEST
            )  # a Python float cannot hold it either
            flat.append(math.inf if is_beyond else float(each))
        else:
            raise ConfigError(f"{path}: {key} contains {each!r}, which is not a number")
    kind = "a scale must be above 0" if is_scale else "a measurement must be at least 0"
    worst = next((x for x in flat if not math.isfinite(x) or x < 0 or (is_scale and x == 0)), None)
    if not flat or worst is not None:
        raise ConfigError(f"{path}: {key} is {worst}: {kind}, and finite. Measure the model again")
    odd = next((x for x in flat if x != 0 and not _SMALLEST <= x <= _LARGEST), None)
    if is_used and odd is not None:
        raise ConfigError(
            f"{path}: {key} is {odd}: a float32 scale can represent 2^-100 to 2^100 only. Measure "
            "the model again"
        )
    return flat


def write_file(
    path: Path,
    nodes: Mapping[str, Node],
    mode: FileMode,
    *,
    global_rank: int | None = None,
    local_rank: int | None = None,
    is_part: bool = False,
) -> None:
    """Write a file of measurements or scales, its `.npz` copy, and the list of modules.

    Raises:
        ConfigError: it cannot be written.
    """
    is_scale = mode == "Scale"

    def shaped(numbers: Sequence[float]) -> Any:
        if is_scale:
            return numbers[0] if len(numbers) == 1 else list(numbers)
        return [[number] for number in numbers]

    plain = {name: _plain(node, shaped) for name, node in nodes.items()}
    head: dict[str, Any] = {"GlobalRank": global_rank, "LocalRank": local_rank, "Mode": mode}
    if is_part:
        head[_IS_PART] = True
    arrays = {name: _plain(node, lambda x: np.array(shaped(x))) for name, node in nodes.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write a new file and rename it, because a run may be stopped at any time.
        new = path.with_suffix(".json.new")
        new.write_text(json.dumps({**head, "Nodes": plain}, indent=4), encoding="utf-8")
        new.replace(path)
        twin: Any = {**head, "Nodes": arrays}
        np.savez(path.with_suffix(".npz"), np.array(twin, dtype=object))
        if not is_scale:
            names = json.dumps(list(nodes), indent=4)
            path.with_name(f"{path.stem}_mod_list.json").write_text(names, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _plain(node: Node, shaped: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"inputs": [shaped(numbers) for numbers in node.inputs]}
    if node.outputs:
        found["outputs"] = [shaped(numbers) for numbers in node.outputs]
    if node.weight is not None:
        found["params"] = {"weight": shaped(node.weight)}
    return found


def merged(nodes: Mapping[str, Node], other: Measurements) -> dict[str, Node]:
    """Merge two measurements of the same model: the larger value of each.

    Raises:
        ConfigError: they have different modules.
    """
    found = {name: other.find(name) for name in nodes}
    unknown = [name for name, node in found.items() if node is None]
    if unknown or len(nodes) != len(other.nodes):
        odd = (unknown or sorted(other.nodes.keys() - nodes.keys()))[0]
        raise ConfigError(
            f"{other.path}: Nodes.{odd} is missing from one of the two measurements to merge: the "
            "two measurements are from different models"
        )
    return {name: _larger(nodes[name], node) for name, node in found.items() if node is not None}


def _larger(one: Node, two: Node) -> Node:
    def of(a: list[float], b: list[float]) -> list[float]:
        return [max(*pair) for pair in zip(a, b, strict=True)] if len(a) == len(b) else a + b

    weight = one.weight
    if weight is not None and two.weight is not None:
        weight = of(weight, two.weight)
    inputs, outputs = (
        [of(a, b) for a, b in zip(first, second, strict=False)]
        for first, second in ((one.inputs, two.inputs), (one.outputs, two.outputs))
    )
    return Node(inputs, outputs, weight)
