"""Convert measurements of some ranks to fewer or more ranks.

If ranks slice the experts, each has a part of the features of every expert. If ranks divide the
experts (`--enable-expert-parallel`), each numbers its own experts from 0. Reads no files.
"""

import re
from collections.abc import Mapping, Sequence

from vllm.errors import ConfigError
from vllm.model_executor.quantization.inc.files import Measurements, Node, merged

_EXPERT = re.compile(r"(?P<op>.+)\.(?P<part>w13_list|w2_list)\.(?P<number>\d+)")


def unify(parts: Sequence[Measurements], *, shares_experts: bool = False) -> dict[str, Node]:
    """Combine the measurements of several ranks to the measurements of one rank, by taking the
    larger values.

    Args:
        parts: measurements of neighbouring ranks, in order.
        shares_experts: each rank has different experts. Then expert i of part p becomes expert p *
            experts + i, and the per-expert inputs of the module of all experts are concatenated.

    Raises:
        ConfigError: the files do not contain the same modules.
    """
    if not shares_experts:
        nodes = parts[0].nodes
        for part in parts[1:]:
            nodes = merged(nodes, part)
        return nodes
    experts: dict[str, Node] = {}
    first: dict[str, Node] = {}
    for place, part in enumerate(parts):
        others = {n: node for n, node in part.nodes.items() if not _EXPERT.fullmatch(n)}
        counts = _expert_counts(part.nodes)
        for name, node in part.nodes.items():
            if (match := _EXPERT.fullmatch(name)) is not None:
                number = place * counts[match["op"]] + int(match["number"])
                experts[f"{match['op']}.{match['part']}.{number}"] = node
        kept = {op: [*first[op].inputs[1:], *others[op].inputs[1:]] for op in counts if op in first}
        alone = {**others, **{op: _of_all(others[op]) for op in counts}}
        before = {**first, **{op: _of_all(first[op]) for op in kept}}
        first = merged(alone, Measurements(part.path, before)) if place else others
        for op, inputs in kept.items():
            first[op].inputs += inputs
    return first | experts


def expand(measured: Measurements, num_parts: int) -> list[dict[str, Node]]:
    """Divide the measurements of one rank among `num_parts` ranks.

    The experts are divided; other measurements are the same on each rank.

    Raises:
        ConfigError: the experts cannot be divided evenly.
    """
    counts = _expert_counts(measured.nodes)
    for op, count in counts.items():
        if count % num_parts:
            raise ConfigError(
                f"{measured.path}: Nodes.{op} has {count} experts, which cannot be divided evenly "
                f"among {num_parts} ranks"
            )
    found: list[dict[str, Node]] = [{} for _ in range(num_parts)]
    for name, node in measured.nodes.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            place, number = divmod(int(match["number"]), counts[match["op"]] // num_parts)
            found[place][f"{match['op']}.{match['part']}.{number}"] = node
            continue
        for place, nodes in enumerate(found):
            nodes[name] = node
            share = counts.get(name, 0) // num_parts
            if len(node.inputs) == 1 + counts.get(name, 0) and share:
                own = node.inputs[1 + place * share : 1 + (place + 1) * share]
                nodes[name] = Node([node.inputs[0], *own], node.outputs, node.weight)
    return found


def _expert_counts(nodes: Mapping[str, Node]) -> dict[str, int]:
    """Count the experts of each layer, by the name of the module of all experts."""
    numbers: dict[str, set[int]] = {}
    for name in nodes:
        if (match := _EXPERT.fullmatch(name)) is not None:
            numbers.setdefault(match["op"], set()).add(int(match["number"]))
    return {op: len(found) for op, found in numbers.items() if op in nodes}


def _of_all(node: Node) -> Node:
    """Return the node without the inputs of single experts."""
    return Node(node.inputs[:1], node.outputs, node.weight)
