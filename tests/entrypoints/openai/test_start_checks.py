"""Test arguments that a server refuses before it listens: flags -> message, without slow
imports.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loops import loop_over
from tests.tiny_images import make_tiny_images
from vllm.assets import BUNDLED_MODEL
from vllm.entrypoints.openai.cli_args import make_arg_parser, read_args
from vllm.entrypoints.server.log_setup import configure_logs
from vllm.entrypoints.server.start_checks import check_start
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.utils import FlexibleArgumentParser

ROOT = Path(__file__).resolve().parents[3]
CONFIG = json.loads((BUNDLED_MODEL / "config.json").read_text())


def check(*flags):
    engine_args, args = read_args(make_arg_parser(FlexibleArgumentParser()).parse_args(flags))
    return check_start(engine_args, args)


@pytest.fixture
def model(tmp_path):
    """Return a copy of the bundled model without its weights, which a test may change."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_settings_of_an_image_processor_are_checked_without_transformers(family, tmp_path):
    folder = make_tiny_images(family, tmp_path)
    path = folder / "preprocessor_config.json"
    good = path.read_text()
    program = (
        "import json, pathlib, sys\n"
        "from vllm.entrypoints.openai.cli_args import make_arg_parser, read_args\n"
        "from vllm.entrypoints.server.start_checks import check_start\n"
        "from vllm.utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "for text, flags in json.loads(sys.argv[2]):\n"
        "    pathlib.Path(sys.argv[1]).write_text(text)\n"
        "    try: check_start(*read_args(parser.parse_args(flags)))\n"
        "    except Exception as error: print(error)\n"
        "    else: print()\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    bad = json.dumps({**json.loads(good), "rescale_factor": "x"})
    cases = (
        (good, [], ""),
        (bad, [], "preprocessor_config.json or processor_config.json: rescale_factor is 'x'"),
        (bad, ["--limit-mm-per-prompt", "image=0"], ""),
        ("{", [], "preprocessor_config.json"),
        (good, ["--mm-processor-kwargs", '{"side": 1}'], "has no setting 'side'"),
    )
    given = json.dumps([(text, ["--model", str(folder), *flags]) for text, flags, _ in cases])
    command = [sys.executable, "-c", program, str(path), given]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    *found, modules = run.stdout.splitlines()
    for line, (text, _, message) in zip(found, cases, strict=True):
        assert message in line and bool(line) == bool(message), (text, run)
    assert modules == "[]"


@pytest.fixture
def file(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_a_config_that_takes_neither_hub_nor_transformers_is_complete():
    config = check("--max-model-len", "256", "--chat-template", "{{ messages[0]['content'] }}")
    assert config.model.path == str(BUNDLED_MODEL)
    assert config.scheduler.max_model_len == 256


@loop_over(
    "flags, message",
    [
        (["-tp", "0"], "^tensor_parallel_size must be an integer of at least 1, got 0"),
        (["-pp", "99"], "^pipeline_parallel_size=99: the model has [0-9]+ layers"),
        (["-dp", "0"], "^data_parallel_size must be an integer of at least 1, got 0"),
        (["--gpu-memory-utilization", "90"], "above 0 and at most 1, got 90.0.* 90 % as 0.9"),
        (["--quantization", "x"], "quantization='x' is not available .* available: int8, int4"),
        (["--max-model-len", "4096"], "^max_model_len=4096: .* at most 2048 .* Lower it to 2048"),
        (["--block-size", "3"], "block_size must be a power of two, got 3"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "Raise the first or lower"),
        (["--served-model-name", ""], "served_model_name must not be empty"),
        (["--generation-config", "/no/such"], "generation_config='/no/such'"),
        (["--override-generation-config", '{"a": 1}'], "override_generation_config: 'a' is not"),
        (
            ["--override-pooler-config", '{"a": 1}'],
            "override_pooler_config has no effect with task 'generate'",
        ),
        (
            ["--task", "classify"],
            "task='classify' is not available for LlamaForCausalLM; available: ",
        ),
        (["--tokenizer", "/no/such"], "folder '/no/such' does not exist"),
        (["/no/such"], "model folder '/no/such' does not exist"),
        (["a", "--model", "b"], "the model is given twice"),
        (["/etc"], "model folder '/etc' has no config.json"),
        (["/etc/passwd"], "model '/etc/passwd' is a file; name the folder"),
        (["--ssl-certfile", "/no/cert"], "ssl_certfile='/no/cert' cannot be read: No such file"),
        (["--ssl-certfile", "/etc/passwd"], "ssl_certfile='/etc/passwd' cannot be used: .*PEM"),
        (["--ssl-ca-certs", "x"], "ssl_ca_certs needs ssl_certfile"),
        (["--api-key", "a\n"], "api_key must not have line breaks"),
        (["--chat-template", "/no/such"], "is neither a file .*No such file"),
        (["--chat-template", "{{ a"], "line 1 is not valid Jinja: unexpected end of template"),
        (["--chat-template", "\n{% foo %}"], "line 2 is not valid Jinja: Encountered unknown tag"),
        (["--chat-template", "{{ a | foo }}"], "line 1 is not valid Jinja: No filter named 'foo'"),
        (["--middleware", "no.such.thing"], "middleware='no.such.thing' cannot be imported"),
        (["--middleware", "json.loads"], "neither a class nor a coroutine function"),
        (["--tool-call-parser", "hermse"], "tool_call_parser 'hermse' is not one of "),
        (["--reasoning-parser", "r1"], "reasoning_parser 'r1' is not one of "),
        (["--tool-parser-plugin", "/no/plug-in.py"], "there is no file /no/plug-in.py"),
        (["--lora-modules", "a=/b"], "lora_modules=a=/b needs enable_lora=True"),
        (["--enable-lora", "--lora-modules", "a=/no/b"], "lora_modules: .*/b is not a folder"),
        (["--otlp-traces-endpoint", "http://h:x"], "otlp_traces_endpoint='http://h:x'"),
        (["--allowed-local-media-path", "/no/such"], "media-path '/no/such' is not a folder"),
        (["--allowed-media-domains", "http://a"], "allowed-media-domains 'http://a': .*hosts only"),
    ],
)
def test_a_flag_that_no_server_can_start_with_is_named(flags, message):
    with pytest.raises(ConfigError, match=message):
        check(*flags)


@pytest.mark.parametrize(
    "flags", [["-pp", "0"], ["--block-size", "3"], ["--served-model-name", ""]]
)
def test_what_is_wrong_with_every_model_needs_no_hub(flags):
    with pytest.raises(ConfigError, match=r"at least 1|power of two|must not be empty"):
        check("some/model-on-the-hub", *flags)


def test_a_model_on_the_hub_is_left_for_later(monkeypatch):
    monkeypatch.setattr("vllm.engine.resolve.early.is_offline", lambda: False)
    assert check("some/model-on-the-hub") is None


def test_a_model_that_only_transformers_knows_is_checked_as_far_as_its_file_goes(model):
    (model / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"a": 1}}))
    assert check(str(model)) is None
    with pytest.raises(ConfigError, match=r"^max_model_len=9999: .* at most 2048"):
        check(str(model), "--max-model-len", "9999")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", "no weights in .*model: expected model.safetensors or "),
        ("tokenizer.json", "no usable tokenizer in .*model': the folder has none of tokenizer.js"),
    ],
)
def test_a_folder_without_a_file_that_is_needed_is_named(model, missing, message):
    (model / "model.safetensors").touch()
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        check(str(model))


def test_no_weights_are_needed_where_none_are_read(model):
    assert check(str(model), "--load-format", "dummy") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise OSError(7)", "cannot be imported: OSError: 7"),
        ("x = 1", "registers no parser"),
        ("x = ", "cannot be imported: SyntaxError"),
    ],
)
def test_a_plug_in_is_run(file, text, message):
    with pytest.raises(ConfigError, match=message):
        check("--tool-parser-plugin", file("plugin.py", text))


def test_templates_as_transformers_takes_them_are_accepted(file):
    template = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}"
    )
    assert check("--chat-template", file("chat.jinja", template + "{% endfor %}")) is not None


def test_a_mistake_is_told_before_the_port_and_without_slow_imports():
    """This runs the whole command: torch and transformers are not imported, and no port is
    announced.
    """
    code = """
import sys
from vllm.entrypoints.cli.main import main
code = main(["serve", "--port", "0", "--max-model-len", "9999", "--tool-call-parser", "hermes"])
slow = {"torch", "transformers", "fastapi", "uvicorn"} & set(sys.modules)
print(code, sorted(slow))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert result.stdout == "2 []\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "error: --max-model-len 9999: config.json of the model allows at most 2048 tokens"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file or directory$"), ("{", "Expecting"), ('{"version": 2}', "version: 2$")],
)
def test_a_log_config_that_cannot_be_used_is_named(file, text, message):
    path = "/no/such" if text is None else file("log.json", text)
    with pytest.raises(ConfigError, match=f"^log_config_file='{path}': .*{message}"):
        configure_logs(ServerArgs(log_config_file=path))
