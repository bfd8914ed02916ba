"""Test converting Python's patterns to the dialects of the libraries: `re.fullmatch` accepts every
output.
"""

import json
import random
import re
import sys
import unicodedata

import pytest

from tests.loops import loop_over
from tests.structured_output.helpers import compiled, open_matcher, walk
from vllm.structured_output.backends.interface import BackendError
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
@loop_over("pattern", PATTERNS)
def test_every_output_matches_in_python(pattern):
    grammar, rng = compiled("regex", pattern), random.Random(1)
    outputs = [walk(open_matcher(grammar), rng, 150) for _ in range(30)]
    ended = [output for output in outputs if output is not None]
    assert len(ended) > 15
    for output in ended:
        assert re.fullmatch(pattern, output), output


@pytest.mark.filterwarnings("ignore:Possible")
@loop_over("pattern", PATTERNS)
def test_a_pattern_that_may_match_anywhere_does_so_in_python(pattern):
    schema = {"type": "string", "pattern": pattern}
    grammar, rng = compiled("json", schema), random.Random(2)
    assert grammar.backend == "llguidance"
    outputs = [walk(open_matcher(grammar), rng, 150) for _ in range(5)]
    for output in filter(None, outputs):
        assert re.search(pattern, json.loads(output)), output


@loop_over(
    "pattern, reason",
    [
        ("(a", "not a regular expression"),
        ("[z-a]", "not a regular expression"),
        ("a**", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-references"),
        ("(a)?(?(1)b|c)", "conditional groups"),
        (r"a\b", "word boundaries"),
        ("a$b", "[$] only at its end"),
        ("(^a)+", "only at the beginning"),
        ("(?m)^a", "flag m"),
        ("\ud800", "surrogate"),
        (r"\ud800", "surrogate at position 0"),
        (r"\U0000dfff", "surrogate at position 0"),
        (r"ab\y", r"the escape \\y at position 2 is not supported"),
        (r"\p{L}\Qa\E", r"the escape \\Q at position 5 is not supported"),
        (r"\p{L", r"\\p at position 0 must be followed by a Unicode property"),
        (r"a\P", r"\\P at position 1 must be followed by a Unicode property"),
        (r"[\p{L}-z]", r"bad character range \\p\{L\}-z at position 1"),
        (r"[a-\p{L}]", r"\\p\{L\} is a class"),
        (r"\u{110000}", "not the code point of a character"),
        (r"(?<n>a)(?P=n)", "back-references"),
        ("a++", "possessive repeat" if sys.version_info >= (3, 11) else "multiple repeat"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(pattern, reason):
    with pytest.raises(RegexError, match=reason):
        translate(pattern)


def category(prefix: str):
    """Return whether a character has a Unicode category, by Python's tables."""
    return lambda c: unicodedata.category(c).startswith(prefix) or unicodedata.category(c) == "Cn"


def is_greek(c: str) -> bool:
    # Python does not know the scripts of characters: look for GREEK in the name of the character.
    # The ohm sign is Greek because it is normalized to omega.
    names = [unicodedata.name(each, "GREEK") for each in c + unicodedata.normalize("NFKC", c)]
    return any("GREEK" in name or name == "NOMISMA SIGN" for name in names)


@pytest.mark.parametrize(
    ("pattern", "is_right"),
    [
        (r"\p{L}+", category("L")),
        (r"\pL+", category("L")),
        (r"\p{ Lu }+", category("Lu")),
        (r"\p{Uppercase_Letter}+", category("Lu")),
        (r"\p{gc=Nd}+", category("Nd")),
        (r"\P{N}+", lambda c: not unicodedata.category(c).startswith("N")),
        (r"[^\p{N}\p{L}]+", lambda c: unicodedata.category(c)[0] not in "NL"),
        (r"[\p{Lu}\d_]+", lambda c: category("Lu")(c) or c in "0123456789_"),
        (r"[\P{L}]+", lambda c: not unicodedata.category(c).startswith("L")),
        (r"(?:\p{Lu}|-)+", lambda c: category("Lu")(c) or c == "-"),
        (r"\p{Script=Greek}+", is_greek),
        (r"\p{Greek}+", is_greek),
    ],
)
def test_a_property_of_unicode_allows_the_characters_that_have_it(pattern, is_right):
    grammar, rng = compiled("regex", pattern), random.Random(3)
    outputs = [walk(open_matcher(grammar), rng, 60) for _ in range(40)]
    ended = [output for output in outputs if output]
    assert len(ended) > 15
    for output in ended:
        assert all(map(is_right, output)), output
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    grammar = compiled("json", schema)
    for _ in range(10):
        output = walk(open_matcher(grammar), rng, 60)
        if output is not None:
            assert all(map(is_right, json.loads(output))), output


@pytest.mark.parametrize(
    ("pattern", "python"),
    [
        (r"\u{1F600}\x{41}[\u{61}-\u{63}]", "\U0001f600A[a-c]"),
        (r"\ud83d\ude00?", "\U0001f600?"),
        (r"(?<year>\d{4})-(?<month>\d\d)", r"(?P<year>\d{4})-(?P<month>\d\d)"),
        (r"ab\z", r"ab\Z"),
        (r"\/\-\.", r"/-\."),
        (r"[](?<a>]{2}", r"[](?<a>]{2}"),
        (r"[^](?<a>]b", r"[^](?<a>]b"),
        (r"\[(?<a>b)\]", r"\[(?P<a>b)\]"),
        (r"\\p{2}", r"\\p{2}"),
        (r"\\p\{L\}", r"\\p\{L\}"),
    ],
)
def test_what_others_write_differently_has_its_meaning(pattern, python):
    grammar, rng = compiled("regex", pattern), random.Random(4)
    ended = [o for o in (walk(open_matcher(grammar), rng, 60) for _ in range(30)) if o is not None]
    assert ended
    for output in ended:
        assert re.fullmatch(python, output, re.ASCII), output


def test_a_property_that_does_not_exist_is_named():
    with pytest.raises(BackendError, match=r"^\\p\{Foo\}: Unicode property not found$"):
        compiled("regex", r"a\p{Foo}")


@pytest.mark.filterwarnings("ignore:Possible")
@loop_over("pattern", [*PATTERNS, r"[\p{Lu}_]+", r"[^\p{L}]"])
def test_xgrammar_enforces_a_pattern_or_is_not_asked(pattern):
    """xgrammar silently misinterprets some character classes."""
    try:
        grammar = compiled("regex", pattern, backend="xgrammar", may_fall_back=False)
    except BackendError as error:
        assert "the fallback is disabled" in str(error)
        return
    rng = random.Random(5)
    for _ in range(30):
        output = walk(open_matcher(grammar), rng, 150)
        assert output is None or re.fullmatch(pattern, output), output
