"""Test recorded traffic: which sizes are counted, which are stored, and the errors of damaged
files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bucketing.helpers import make_limits
from vllm.bucketing.bucket import Bucket, Phase, decode, prefill
from vllm.bucketing.traffic import MAX_CELLS, TrafficTable, even_traffic, rounded_sizes
from vllm.errors import ConfigError


def make_table() -> TrafficTable:
    table = TrafficTable(128)
    table.add(Phase.DECODE, 28, 1, 282, seconds=0.5, count=3)
    table.add(Phase.PREFILL, 1, 1000, 0)
    return table


def test_sizes_are_rounded_up_by_at_most_a_sixteenth_and_small_ones_not_at_all() -> None:
    for size in [*range(1, 700), 4103, 131_071, 10**9]:
        table = TrafficTable(128)
        table.add(Phase.DECODE, size, 1, size)
        [(shape, count, _)] = list(table)
        assert count == 1
        assert shape.batch == shape.blocks
        assert size <= shape.batch <= size * 17 / 16
        assert size > 32 or shape.batch == size
        assert rounded_sizes(np.array([size])) == [shape.batch]


def test_counts_and_seconds_of_alike_shapes_are_added_up() -> None:
    table = make_table()
    table.add(Phase.DECODE, 28, 1, 281, seconds=0.25)
    assert list(table) == [(prefill(1, 1024), 1, 0), (decode(28, 288), 4, 0.75)]
    assert table.num_launches == 5
    assert table.sizes(Phase.DECODE) == {
        "batch": {28: 4.0},
        "query_len": {1: 4.0},
        "blocks": {288: 4.0},
    }


def test_a_full_table_forgets_the_rarest_shapes_and_says_how_many() -> None:
    table = TrafficTable(128)
    for _ in range(2):
        table.add(Phase.DECODE, 7, 1, 7)
    for number in range(3 * MAX_CELLS):
        table.add(Phase.PREFILL, number % 32 + 1, number % 31 + 1, number % 29)
    assert len(table) <= MAX_CELLS
    assert table.num_launches + table.num_forgotten == 2 + 3 * MAX_CELLS
    assert (decode(7, 7), 2, 0) in list(table)


def test_a_file_gives_the_table_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    path.write_text("older")
    make_table().save(path)
    assert TrafficTable.load(path, 128) == make_table()
    assert [each.name for each in tmp_path.iterdir()] == ["traffic.json"]
    merged = TrafficTable.load(path)
    merged.merge(make_table())
    assert [count for _, count, _ in merged] == [2, 6]
    with pytest.raises(
        ConfigError, match="cannot add traffic that was recorded with blocks of 16 tokens"
    ):
        merged.merge(TrafficTable(16))


def changed(**fields: Any) -> str:
    return json.dumps({**make_table().to_json(), **fields})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON, or is cut off"),
        (changed()[:-30], "not JSON, or is cut off"),
        ("[" * 100_000, "not JSON, or is cut off"),
        ("[]", "its field 'format' must be 'vllm traffic'"),
        (changed(version=2), "must be 1, got 2"),
        (changed(block_size=0), "block size is 0"),
        (changed(cells=None), "no list 'cells'"),
        (changed(cells=[]), "has no traffic"),
        (changed(cells=[["decode", 1]]), "cell 0 does not have six values"),
        (changed(cells=[["both", 1, 1, 1, 1, 0]]), "phase 'both', not prefill or decode"),
        (changed(cells=[["decode", -1, 1, 1, 1, 0]]), "batch -1"),
        (changed(cells=[["decode", 1, 1, 1e30, 1, 0]]), "blocks 1e\\+30"),
        (changed(cells=[["decode", 1, 1, 1, float("nan"), 0]]), "count nan"),
        (changed(num_forgotten="x"), "num_forgotten is 'x'"),
        (changed(block_size=16), "blocks of 16 tokens, and this engine has blocks of 128"),
    ],
)
def test_a_damaged_file_is_one_line_that_says_what_is_wrong(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "traffic.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        TrafficTable.load(path, 128)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xff")
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "absent", "No such file or directory"),
        (tmp_path / "latin", "it is not text in UTF-8"),
        (Path("/dev/full"), "it is a device"),
    ):
        with pytest.raises(ConfigError) as error:
            TrafficTable.load(path)
        assert str(error.value).startswith(f"recorded traffic {path} cannot be read: {reason}. ")


def test_shapes_are_cut_to_what_an_engine_can_launch() -> None:
    limits = make_limits(num_blocks=33, enable_chunked_prefill=True)
    table = TrafficTable(128)
    table.add(Phase.DECODE, 300, 4, 10_000)
    table.add(Phase.PREFILL, 1, 5000, 200)
    table.add(Phase.PREFILL, 3, 1, 3)
    assert table.shapes_within(limits, Phase.DECODE)[0].tolist() == [[1, 4, 1, 32]]
    assert table.shapes_within(limits, Phase.PREFILL)[0].tolist() == [[0, 1, 2048, 0], [0, 3, 1, 3]]


@pytest.mark.parametrize("max_draft_tokens", [0, 3])
def test_an_even_traffic_has_the_smallest_and_the_largest_of_each_size(
    max_draft_tokens: int,
) -> None:
    limits = make_limits(num_blocks=65, max_draft_tokens=max_draft_tokens)
    shapes = {shape for shape, _, _ in even_traffic(limits)}
    assert {decode(1, 1), decode(4, 64), prefill(1, 2048), prefill(1, 128)} <= shapes
    assert {s.query_len for s in shapes if s.phase is Phase.DECODE} == {1, 1 + max_draft_tokens}
    assert all(isinstance(shape, Bucket) for shape in shapes)
