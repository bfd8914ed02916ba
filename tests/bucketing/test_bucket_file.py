import pytest

from tests.bucketing.helpers import make_limits, pairs, triples
from vllm.bucketing.bucket import decode, prefill
from vllm.bucketing.strategies.bucket_file import parse_buckets
from vllm.bucketing.strategies.generate import buckets_from_file
from vllm.errors import ConfigError


def test_a_line_is_expanded_to_every_combination():
    buckets = parse_buckets("([1,2], 1, range(128, 513, 128))", "f")
    assert pairs(buckets) == [(b, n) for b in (1, 2) for n in (128, 256, 384, 512)]
    assert buckets[0] == decode(1, 128)


def test_comments_blank_lines_and_repetitions_are_passed_over():
    text = "# a comment\n\n  (1, 128, 0)  \n(1, [128, 256], range(0, 2))\n"
    assert parse_buckets(text, "f") == [
        prefill(1, 128, 0),
        prefill(1, 128, 1),
        prefill(1, 256, 0),
        prefill(1, 256, 1),
    ]


def test_every_bad_line_is_named_with_its_number():
    text = "\n".join(
        [
            "(1, 128, 0)",
            "(1, 128)",
            "(1, 128, 0",
            "(1, 'a', 0)",
            "(1, __import__('os'), 0)",
            "(0, 128, 0)",
            "(1, 1, 0)",
            "(1, range(0, 9, 0), 1)",
            "(1, range(1, 20000), 1)",
            "([], 1, 1)",
            "(range(1, 200), range(1, 200), 0)",
            "(True, 128, 0)",
        ]
    )
    with pytest.raises(ConfigError) as error:
        parse_buckets(text, "buckets.txt")
    message = str(error.value)
    assert message.startswith("bucket file buckets.txt: line 2 '(1, 128)': not a tuple of three")
    for line, reason in (
        (3, "not a tuple"),
        (4, "query_len is not an integer: 'a'"),
        (5, "query_len is neither an integer, a list nor range"),
        (6, "batch must be at least 1, got 0"),
        (7, "blocks must be at least 1, got 0"),
        (8, "the step of a range must not be 0"),
        (9, "query_len has 19999 values, at most 10000"),
        (10, "batch has no value"),
        (11, "39601 buckets, at most 10000"),
        (12, "batch is not an integer: True"),
    ):
        (part,) = (p for p in message.split("; ") if f"line {line} " in p)
        assert reason in part
    assert "line 1 " not in message


def test_a_file_without_buckets_is_refused():
    with pytest.raises(ConfigError, match="bucket file f contains no bucket"):
        parse_buckets("# nothing\n", "f")


def test_buckets_above_the_token_budget_are_omitted_and_named():
    limits = make_limits(max_num_batched_tokens=2048)
    found = buckets_from_file("([1, 2, 4], 1024, 0)\n(4, 1, 64)", "f", limits)
    assert triples(found.prefill) == [(1, 1024, 0), (2, 1024, 0)]
    assert pairs(list(found.decode)) == [(4, 64)]
    assert found.warnings == (
        "The following prompt buckets from custom bucketing file f exceed "
        "max_num_batched_tokens (2048) and were omitted: [(4, 1024, 0)]",
    )


def test_a_file_may_hold_decode_buckets_only():
    found = buckets_from_file("(4, 1, 64)", "f", make_limits())
    assert found.prefill == ()
    assert found.warnings == ()
