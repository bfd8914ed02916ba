"""Test the command line of the server and the file that it may name, and the arguments that both
give.
"""

import pytest

from vllm import envs
from vllm.entrypoints.openai import cli_args
from vllm.entrypoints.openai.cli_args import make_arg_parser, read_args, serve_while_warming
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser


def read(*argv):
    return read_args(make_arg_parser(FlexibleArgumentParser()).parse_args(argv))


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "server.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("argv", "variables", "want"),
    [
        ([], {}, "first"),
        (["--ready-when", "all"], {}, "all"),
        (["--sampling-warmup", "all"], {}, None),
        (["--sampling-warmup", "all", "--ready-when", "first"], {}, "first"),
        ([], {"VLLM_FULL_WARMUP": "true"}, None),
    ],
)
def test_a_server_begins_before_all_buckets_are_warmed_up(argv, variables, want, monkeypatch):
    monkeypatch.setattr(envs.os, "environ", variables)
    envs.get.cache_clear()
    try:
        engine, _ = read(*argv)
        # Other programs with these flags wait until all shapes are warm.
        assert engine.ready_when in (None, want)
        serve_while_warming(engine)
        assert engine.ready_when == want
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()


def test_nothing_is_needed():
    engine, server = read()
    assert not engine.model and (server.port, server.api_key) == (8000, ())


@pytest.mark.parametrize(
    "argv", [["m"], ["--model", "m"], ["m", "--model", "m"], ["--dtype", "auto", "m"]]
)
def test_the_model_may_be_given_either_way(argv):
    assert read(*argv)[0].model == "m"


def test_two_models_are_one_too_many():
    with pytest.raises(ConfigError, match="'a', and --model 'b'"):
        read("a", "--model", "b")


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--api-key", "a", "b"], "api_key", ("a", "b")),
        (["--api-key", "a", "--api-key", "b"], "api_key", ("a", "b")),
        (["--allowed-origins", '["https://a.example"]'], "allowed_origins", ("https://a.example",)),
        (["--allowed-origins", "a", "b"], "allowed_origins", ("a", "b")),
        (["--middleware", "a.b", "--middleware", "c.d"], "middleware", ("a.b", "c.d")),
        (["--no-status-page"], "status_page", False),
        (["--disable-web-ui"], "disable_web_ui", True),
        (["--reasoning-parser", "qwen3"], "reasoning_parser", "qwen3"),
        (["--otlp-traces-endpoint", "http://t"], "otlp_traces_endpoint", "http://t"),
        (["--enable-log-requests"], "log_requests", True),
        (["--max_queued_requests", "3"], "max_queued_requests", 3),
    ],
)
def test_a_flag_of_the_server_is_a_field(argv, name, value):
    assert getattr(read(*argv)[1], name) == value


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--enforce-eager"], True),
        (["--enforce-eager=True"], True),
        (["--enforce_eager", "true", "m"], True),
        (["--enforce-eager", "m"], True),
        (["--no-enforce-eager"], False),
        (["--enforce-eager", "--enforce-eager=FALSE"], False),
        (["m", "--enforce-eager", "False"], False),
        (["--no-enforce-eager=false"], True),
        (["--no-enforce-eager=true"], False),
    ],
)
def test_true_or_false_may_follow_a_flag_that_is_on_or_off(argv, value):
    assert read(*argv)[0].enforce_eager is value


def test_every_flag_that_is_on_or_off_takes_true_and_false(capsys):
    parser = make_arg_parser(FlexibleArgumentParser())
    known = parser._option_string_actions
    flags = [flag for flag in known if f"--no-{flag[2:]}" in known]
    assert "--multi-step-stream-outputs" in flags and len(flags) > 50
    for flag in flags:
        off = [f"--no-{flag[2:]}"]
        for words, plain in (
            ([flag, "false"], off),
            ([flag, "0"], off),
            ([f"{flag}=No"], off),
            ([f"{flag}=true"], [flag]),
            ([flag, "on"], [flag]),
        ):
            assert parser.parse_args(words) == parser.parse_args(plain)
        with pytest.raises(SystemExit):
            parser.parse_args([f"{flag}=nope"])
        assert (
            f"{flag} must be given without a value, or with true or false, got 'nope'"
        ) in capsys.readouterr().err


def test_flags_of_the_engine_reach_it():
    engine, _ = read("--max-model-len", "8k", "--served-model-name", "a", "b", "--port", "1")
    assert (engine.max_model_len, engine.served_model_name) == (8000, ("a", "b"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "port must be 0 to 65535"),
        (["--max-n", "0"], "max_n"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout"),
        (["--request-timeout", "0"], "request_timeout"),
        (["--max-queued-requests", "-1"], "max_queued_requests"),
        (["--root-path", "api"], "root_path"),
        (["--ssl-keyfile", "k"], "ssl_certfile"),
        (["--allow-credentials"], "allowed_origins"),
        (["--ssl-cert-reqs", "3"], "ssl_cert_reqs"),
        (["--enable-auto-tool-choice"], "tool_call_parser"),
        (["--prompt-adapters", "a=b"], "prompt_adapters"),
        (["--api-key", ""], "api_key"),
        (["--allowed-methods", "[1"], "allowed_methods"),
    ],
)
def test_a_bad_value_is_an_error_that_names_it(argv, message):
    with pytest.raises(ConfigError, match=message):
        read(*argv)


def test_flags_of_the_fork_without_effect_are_accepted():
    flags = ["--api-server-count", "2", "--disable-frontend-multiprocessing"]
    flags += ["--enable-server-load-tracking", "--disable-log-requests", "--swap-space", "4"]
    assert read(*flags) == read()


FILE = """
model: from-file
port: 9000
api-key: [x, y]
max_model_len: 4k
enable-auto-tool-choice: true
tool-call-parser: hermes
hf-overrides: {rope_theta: 3}
"""


def test_a_file_may_hold_flags(config_file):
    engine, server = read("--config", config_file(FILE))
    assert (engine.model, engine.max_model_len) == ("from-file", 4000)
    assert engine.hf_overrides == {"rope_theta": 3}
    assert (server.port, server.api_key) == (9000, ("x", "y"))
    assert (server.enable_auto_tool_choice, server.tool_call_parser) == (True, "hermes")


@pytest.mark.parametrize("is_before", [True, False])
def test_the_command_line_wins_over_the_file(config_file, is_before):
    flags = ["--port", "8000", "--api-key", "k", "--no-enable-auto-tool-choice", "--model", "m"]
    config = ["--config", config_file(FILE)]
    engine, server = read(*(flags + config if is_before else config + flags))
    assert (engine.model, server.port, server.api_key) == ("m", 8000, ("k",))
    assert not server.enable_auto_tool_choice


def test_a_model_tag_wins_over_the_file(config_file):
    assert read("m", "--config", config_file(FILE))[0].model == "m"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt: 1", "'prt'; did you mean 'port'"),
        ("port: [1]", "port must be an integer"),
        ("port: many", "port must be an integer"),
        ("max-num-seqs: 3\nmax_num_seqs: 4", "twice"),
        ("- port", "must map names of flags to values"),
        ("port: [", "cannot read"),
        ("config: other.yaml", "'config'"),
        ("api-key: 3", "api_key must be one or more strings"),
    ],
)
def test_a_file_that_says_nonsense_is_an_error(config_file, text, message):
    with pytest.raises(ConfigError, match=message):
        read("--config", config_file(text))


def test_a_file_that_is_missing_is_an_error():
    with pytest.raises(ConfigError, match="cannot read the config file '/no/file'"):
        read("--config", "/no/file")


def test_an_empty_file_says_nothing(config_file):
    assert read("--config", config_file("# nothing\n"))[1].port == 8000


@pytest.mark.parametrize(("argv", "key"), [([], ("env",)), (["--api-key", "flag"], ("flag",))])
def test_variables_stand_behind_flags(monkeypatch, argv, key):
    variables = {
        "VLLM_API_KEY": "env",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "7",
    }
    monkeypatch.setattr(cli_args.envs, "get", lambda: envs.Envs.load(variables))
    _, server = read(*argv)
    assert (server.api_key, server.dev_mode, server.keep_alive_timeout) == (key, True, 7)
