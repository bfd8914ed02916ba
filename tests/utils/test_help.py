"""Test `--help` with a topic."""

import pytest

from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.arguments import FlexibleArgumentParser, add_number, add_text


def said(topic: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and the output of `vllm serve --helpTOPIC`."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve", usage="vllm serve [flags]"))
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([f"--help{topic}"])
    shown = capsys.readouterr()
    return ended.value.code, shown.out + shown.err


@pytest.mark.parametrize(
    ("topic", "code", "parts", "others"),
    [
        ("", 0, ["usage: vllm serve", "CacheConfig ", "--help=all"], ["--block-size"]),
        ("=all", 0, ["--block-size", "--api-key", "usage: vllm serve"], []),
        ("=listgroup", 0, ["CacheConfig ", "ServerArgs "], ["usage", "--block-size"]),
        ("=cacheconfig", 0, ["--block-size", "blocks and memory"], ["--api-key"]),
        ("=max_num_seqs", 0, ["--max-num-seqs"], ["--max-model-len ", "--num-kept-states"]),
        ("=--max-num-seqs", 0, ["--max-num-seqs"], ["--max-model-len "]),
        ("=lora", 0, ["--enable-lora", "--max-loras", "LoRAConfig"], ["--block-size"]),
        ("=collisions", 0, ["--prefix-caching-hash-algo"], ["--block-size"]),
        ("=no such words", 2, ["no flag of 'vllm serve' matches 'no such words'"], ["usage"]),
    ],
)
def test_topics(topic, code, parts, others, capsys):
    found, text = said(topic, capsys)
    assert found == code
    assert [part for part in parts if part not in text] == []
    assert [part for part in others if part in text] == []


def test_a_command_with_few_flags_shows_them(capsys):
    parser = FlexibleArgumentParser(prog="few")
    parser.add_argument("--one", help="the only flag")
    with pytest.raises(SystemExit):
        parser.parse_args(["-h"])
    assert "the only flag" in capsys.readouterr().out


def test_the_help_of_a_flag_names_its_default_once(capsys):
    parser = FlexibleArgumentParser(prog="few")
    add_number(parser, "--count", "how many", 3)
    add_number(parser, "--share", "how much", 1.0)
    add_text(parser, "--host", "where (default: the first)", "a")
    assert vars(parser.parse_args([])) == {"count": 3, "share": 1.0, "host": "a"}
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = capsys.readouterr().out
    for flag in (
        "--count N   how many (default: 3)\n",
        "--share X   how much (default: 1)\n",
        "--host TEXT  where (default: the first)\n",
    ):
        assert " ".join(flag.split()) in " ".join(shown.split())
