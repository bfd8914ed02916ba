"""Test the messages of the command line for wrong arguments."""

import pytest

from tests.e2e.server import free_port
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.entrypoints.shared.program import with_flags
from vllm.utils import FlexibleArgumentParser

NAMES = make_arg_parser(FlexibleArgumentParser()).flag_names()


def said_by(args, capsys):
    """Return the exit code, and the text on stdout and stderr."""
    try:
        code = main(args)
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("args", [[], ["--help"], ["bench"], ["bench", "--help"]])
def test_a_command_without_more_shows_its_help(args, capsys):
    code, out, err = said_by(args, capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: vllm") and "options:\n" in out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["sevre"], "'sevre' is not a command. Did you mean 'vllm serve'?"),
        (["run_batch"], "'run_batch' is not a command. Did you mean 'vllm run-batch'?"),
        (["/m/serve"], "'/m/serve' is not a command. To serve that model: vllm serve /m/serve"),
        (["facebook/opt-125m"], "To serve that model: vllm serve facebook/opt-125m"),
        (["a b/c", "--port", "1"], "To serve that model: vllm serve 'a b/c'"),
        (["llama"], "To serve a model of that name: vllm serve llama"),
        (["--port", "1", "serve"], "--port comes before the command. Flags follow it"),
        (["bench", "srve"], "invalid choice: 'srve'. Did you mean 'serve'? Choose from serve, "),
        (["serve", "--dtype", "bf16"], "invalid choice: 'bf16'. Did you mean 'bfloat16'?"),
        (["serve", "--max-num-seqs", "x"], "argument --max-num-seqs: must be an integer, got 'x'"),
        (["serve", "--limit-mm-per-prompt", "x"], "must be integers by name, such as image=4"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(args, text, capsys):
    code, out, err = said_by(args, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and text in err


@pytest.mark.parametrize("command", ["serve", "run-batch", "generate"])
def test_no_section_of_a_help_is_empty(command, capsys):
    code, out, _ = said_by([command, "--help=all"], capsys)
    assert code == 0
    sections = out.split("\n\n")
    heads = [text for text in sections if text.split("\n")[0].endswith(":")]
    assert heads
    for head in heads:
        is_text_alone = "  -" not in head and "positional arguments" not in head
        following = sections[sections.index(head) + 1 :][:1]
        assert not is_text_alone or following[0].startswith("  -"), head


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("max_num_seqs must be at least 1", "--max-num-seqs must be at least 1"),
        ("port must be 0 to 65535, got 7", "--port must be 0 to 65535, got 7"),
        ("quantization='x' is not available", "--quantization x is not available"),
        ("dtype='a b' is wrong", "--dtype 'a b' is wrong"),
        ("enable_lora=True: not available", "--enable-lora: not available"),
        ("enable_prefix_caching=False: no", "--no-enable-prefix-caching: no"),
        ("lora_modules='a=b': no", "--lora-modules a=b: no"),
        ("""hf_overrides='{"a": 1}', or""", """--hf-overrides '{"a": 1}', or"""),
        ("Name one with tokenizer=..., or", "Name one with --tokenizer ..., or"),
        (
            "max_num_seqs (3) is above max_model_len (2)",
            "--max-num-seqs (3) is above --max-model-len (2)",
        ),
        ("the model and its port", "the model and its port"),
        ("/x/max_num_seqs/y, max_num_seqs.json", "/x/max_num_seqs/y, max_num_seqs.json"),
        ('"max_model_len": 3', '"max_model_len": 3'),
        ("--max-num-seqs 3", "--max-num-seqs 3"),
    ],
)
def test_names_of_settings_become_flags(message, told):
    assert with_flags(message, NAMES) == told


def test_a_benchmark_says_how_long_it_waits_for_a_server_and_that_it_has(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    flags = ["--base-url", url, "--ready-check-timeout-sec", "0.1", "--random-vocab-size", "9"]
    code, out, err = said_by(["bench", "serve", *flags], capsys)
    assert (code, out) == (2, "")
    waiting, given_up = err.splitlines()
    assert waiting.startswith(f"waiting for {url}, up to 0.1 s (--ready-check-timeout-sec): ")
    assert given_up.startswith(f"error: {url} does not answer within 0.1 s: ")
    assert "Start the server, or name another one with --base-url" in given_up
