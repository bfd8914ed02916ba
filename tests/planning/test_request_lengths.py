"""Test files with request lengths: reading, sampling, and errors of one line."""

import os
from pathlib import Path

import pytest

from vllm.errors import ConfigError
from vllm.planning.request_lengths import is_recorded, read_lengths

HEADER = "input_tokens,output_tokens,timestamp\n"


def write(folder: Path, content: str) -> Path:
    path = folder / "lengths"
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n",
        "timestamp_ms,input_length,output_length\n4000,396,109\n0,374,44\n",
        '{"input_tokens": 374, "output_tokens": 44, "time": 1}\n\n'
        '{"prompt_tokens": 396, "completion_tokens": 109, "time": 5.0}\n',
        "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,374,44\n9,GPT-4,396,109\n",
        "time;input_tokens;output_tokens\n0;374;44\n4;396;109\n",
    ],
    ids=["dates", "milliseconds out of order", "JSON Lines", "BurstGPT", "semicolons"],
)
def test_lengths_and_times_are_read(tmp_path: Path, content: str) -> None:
    found = read_lengths(write(tmp_path, content))
    assert found.num_inputs.tolist() == [374, 396]
    assert found.num_outputs.tolist() == [44, 109]
    assert found.times is not None
    assert found.times.tolist() == pytest.approx([0, 4])
    assert found.notes == ()


def test_lengths_without_times_have_none(tmp_path: Path) -> None:
    found = read_lengths(write(tmp_path, "input,output\n5,1\n7,0\n"))
    assert found.times is None
    assert found.num_outputs.tolist() == [1, 0]


def test_times_of_some_requests_only_are_left_out_and_this_is_said(tmp_path: Path) -> None:
    rows = '{"input": 5, "output": 1, "time": 3}\n{"input": 5, "output": 1}\n'
    found = read_lengths(write(tmp_path, rows))
    assert found.times is None
    assert "times are left out, as 1 of 2 requests have none" in found.notes[0]


@pytest.mark.parametrize(
    ("header", "row"),
    [
        (HEADER, "{0},3,{1}\n"),
        ("\ufeff", '{{"input_tokens": {0}, "output_tokens": 3, "time": {1}}}\n\n'),
    ],
    ids=["CSV", "JSON Lines"],
)
def test_many_requests_are_sampled_at_the_same_rate_and_this_is_said(
    tmp_path: Path, header: str, row: str
) -> None:
    rows = [row.format(n % 50 + 1, n) for n in range(1000)]
    found = read_lengths(write(tmp_path, header + "".join(rows)), max_requests=100)
    assert 50 <= len(found) <= 100
    assert found.times is not None
    assert found.times[-1] / (len(found) - 1) == pytest.approx(1, rel=0.01)
    [note] = found.notes
    assert f"{len(found)} of 1,000 requests are used, evenly sampled" in note
    cut_off = header + "".join([*rows, rows[-1][:4]])  # the last line is not in the sample
    with pytest.raises(ConfigError, match=r"line \d+: it .*cut off"):
        read_lengths(write(tmp_path, cut_off), max_requests=100)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not a CSV file"),
        (HEADER, "has no request"),
        ("once upon a time\n", "must be a JSON object, got 'once"),
        (HEADER + "-3,1,0\n", "line 2: input_tokens must be an integer between 1 .* got '-3'"),
        (HEADER + "3,1e30,0\n", "line 2: output_tokens must be .* got '1e30'"),
        (HEADER + "nan,1,0\n", "line 2: input_tokens must be .* got 'nan'"),
        (HEADER + "3,1.5,0\n", "line 2: output_tokens must be .* got '1.5'"),
        (HEADER + "3,1,soon\n", "line 2: timestamp must be a number or a date"),
        (HEADER + "3,1,0\n3,1", "line 3: it must have 3 values, got 2; is the file cut off"),
        (
            '{"input_tokens": 3, "output_tokens": 1}\n{"inp',
            "line 2: it is not a JSON object, or is cut",
        ),
        ('{"input_tokens": 3, "output_tokens": 1}\n{"in}', "line 2: it is not JSON, or is cut off"),
        ('{"input_tokens": 3}\n', "line 1: it must have output_tokens"),
        ('{"input_tokens": true, "output_tokens": 1}\n', "got 'True'"),
        ('{"input_tokens": 1e999, "output_tokens": 1}\n', "got 'inf'"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_line(
    tmp_path: Path, content: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        read_lengths(write(tmp_path, content))
    assert "\n" not in str(error.value)
    assert "--traffic" in str(error.value)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_lengths(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="cannot be read"):
            is_recorded(path)
