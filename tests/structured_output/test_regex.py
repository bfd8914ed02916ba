"""Python's patterns in the dialect of the libraries: whatever comes out, `re.fullmatch` takes."""

import json
import random
import re

import pytest

from tests.structured_output.helpers import compiled, open_matcher, walk
from vllm.structured_output.regex import RegexError, translate

PATTERNS = [
    r"",
    r"\d{3}-\d{4}",
    r"[a-z]+@[a-z]+\.com",
    r"^abc$",
    r"a.c",
    r".{3}",
    r"(?s).{2}",
    r"\w+",
    r"\s\S",
    r"\S{3}",
    r"\D\W",
    r"[\W]{2}",
    r"[^\W\d]+",
    r"[^\w\s]",
    r"[^\s]{2}\Z",
    r"[^a]{2}",
    r"[\d\-x]{3}",
    r"[[:alpha:]]+",
    r"[]a]",
    r"[a&&b]",
    r"[a-]b",
    r"[.*]",
    r"\.\*\[\]",
    r"(?:a|b)+?c",
    r"(ab){2,3}",
    r"a{,3}",
    r"a{1,2",
    r"{a}",
    r"x{2}?y*?",
    r"a|bc|",
    r"^a|b$",
    r"(?:^a|b$)",
    r"(?P<x>a)b",
    r"(?i)aBc",
    r"(?i)[a-c]k\d",
    r"(?i)[^k]{2}",
    r"(?x) a b  # comment",
    r"a(?#comment)b",
    r"\Aab\Z",
    r"\x41\u0042\101\n\t",
    r"é+[\u4e00-\u4e05]",
    r"\U0001f600?",
    r"~a&b/c\"d\\",
    r"\d+(\.\d+)?",
]


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_output_matches_in_python(pattern):
    grammar, rng = compiled("regex", pattern), random.Random(1)
    outputs = [walk(open_matcher(grammar), rng, 150) for _ in range(60)]
    ended = [output for output in outputs if output is not None]
    assert len(ended) > 30
    for output in ended:
        assert re.fullmatch(pattern, output), output


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_that_may_match_anywhere_does_so_in_python(pattern):
    schema = {"type": "string", "pattern": pattern}
    grammar, rng = compiled("json", schema), random.Random(2)
    assert grammar.backend == "llguidance"
    outputs = [walk(open_matcher(grammar), rng, 150) for _ in range(30)]
    for output in filter(None, outputs):
        assert re.search(pattern, json.loads(output)), output


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "not a regular expression"),
        ("[z-a]", "not a regular expression"),
        ("a**", "not a regular expression"),
        (r"\p{L}", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-references"),
        ("(a)?(?(1)b|c)", "conditional groups"),
        (r"a\b", "word boundaries"),
        ("a$b", "at the end only"),
        ("(^a)+", "at the beginning"),
        ("(?m)^a", "flag m"),
        ("\ud800", "surrogate"),
    ],
    ids=lambda value: value[:20],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(pattern, reason):
    with pytest.raises(RegexError, match=reason):
        translate(pattern)
