"""Buckets that users list in a file, one line each.

    # batch, query_len, blocks
    (1, 128, 0)
    ([1, 2, 4], 1, range(128, 513, 128))     # every combination: 12 decode buckets

Each element is an integer, a list of integers, or range(start, stop[, step]). A line whose
query_len is 1 makes decode buckets, any other prefill buckets. Nothing in the file is executed.
"""

import ast
from itertools import product

from vllm.bucketing.bucket import Bucket, Phase
from vllm.errors import ConfigError

MAX_VALUES = 10_000
"""Values of one element, and buckets of one line."""

_LINE_FORMAT = (
    "(batch, query_len, blocks), each an integer, [integers] or range(start, stop[, step])"
)


def parse_buckets(text: str, source: str) -> list[Bucket]:
    """Parse a file of buckets; return each bucket once, in their order.

    Args:
        text: content of the file.
        source: name of the file, for errors.

    Raises:
        ConfigError: some lines are not buckets (the error lists them), or there is no bucket.
    """
    found: dict[Bucket, None] = {}
    errors = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.update(dict.fromkeys(_parse_line(line.strip())))
        except ValueError as error:
            errors.append(f"line {number} {line.strip()!r}: {error}")
    if errors:
        raise ConfigError(
            f"bucket file {source}: {'; '.join(errors)}. Format of a line: {_LINE_FORMAT}"
        )
    if not found:
        raise ConfigError(
            f"bucket file {source} contains no bucket. Format of a line: {_LINE_FORMAT}"
        )
    return list(found)


def _parse_line(line: str) -> list[Bucket]:
    try:
        node = ast.parse(line, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not a tuple ({error.msg})") from None
    if not isinstance(node, ast.Tuple) or len(node.elts) != 3:
        raise ValueError("not a tuple of three elements")
    names = ("batch", "query_len", "blocks")
    batches, lengths, counts = (
        _values(element, name) for element, name in zip(node.elts, names, strict=True)
    )
    num_buckets = len(batches) * len(lengths) * len(counts)
    if num_buckets > MAX_VALUES:
        raise ValueError(f"{num_buckets} buckets, at most {MAX_VALUES} in a line")
    for name, values, smallest in (
        ("batch", batches, 1),
        ("query_len", lengths, 1),
        ("blocks", counts, 1 if lengths == [1] else 0),
    ):
        if min(values) < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {min(values)}")
    return [
        Bucket(Phase.DECODE if length == 1 else Phase.PREFILL, batch, length, blocks)
        for batch, length, blocks in product(batches, lengths, counts)
    ]


def _values(node: ast.expr, name: str) -> list[int]:
    if isinstance(node, ast.List):
        values = [_integer(element, name) for element in node.elts]
    elif isinstance(node, ast.Call):
        values = _range_values(node, name)
    else:
        values = [_integer(node, name)]
    if not values:
        raise ValueError(f"{name} has no value")
    return values


def _range_values(node: ast.Call, name: str) -> list[int]:
    is_range = isinstance(node.func, ast.Name) and node.func.id == "range"
    if not is_range or node.keywords or len(node.args) not in (2, 3):
        raise ValueError(f"{name} is neither an integer, a list nor range(start, stop[, step])")
    arguments = [_integer(argument, name) for argument in node.args]
    if len(arguments) == 3 and arguments[2] == 0:
        raise ValueError(f"{name}: the step of a range must not be 0")
    values = range(*arguments)
    if len(values) > MAX_VALUES:
        raise ValueError(f"{name} has {len(values)} values, at most {MAX_VALUES}")
    return list(values)


def _integer(node: ast.expr, name: str) -> int:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{name} is not an integer: {ast.unparse(node)}") from None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is not an integer: {value!r}")
    return value
