"""Test log lines as a user sees them. Each test is a new process, because logging is configured
once.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm import envs

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "", **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


LOG_ONE_LINE = """
from vllm.logger import init_logger
init_logger("vllm.some.module").{level}("%d tokens", 3)
"""


def test_a_line_has_level_time_file_line_and_message_and_goes_to_stderr():
    result = run_python(LOG_ONE_LINE.format(level="info"))
    assert re.fullmatch(r"INFO \d\d-\d\d \d\d:\d\d:\d\d <string>:3\] 3 tokens\n", result.stderr), (
        result.stderr
    )
    assert result.stdout == ""


def test_the_file_of_a_line_is_its_base_name(tmp_path):
    script = tmp_path / "runner.py"
    script.write_text(LOG_ONE_LINE.format(level="warning"))
    result = run_python(f"import runpy; runpy.run_path({str(script)!r})")
    assert re.fullmatch(r"WARNING \S+ \S+ runner.py:3\] 3 tokens\n", result.stderr), result.stderr


@pytest.mark.parametrize(("level", "lines"), [("DEBUG", 1), ("INFO", 0), ("WARNING", 0)])
def test_the_level_comes_from_the_environment(level, lines):
    result = run_python(LOG_ONE_LINE.format(level="debug"), VLLM_LOGGING_LEVEL=level)
    assert result.stderr.count("\n") == lines


def test_a_bad_level_is_an_error_that_names_the_variable():
    result = run_python(LOG_ONE_LINE.format(level="info"), VLLM_LOGGING_LEVEL="loud")
    assert result.returncode == 1
    assert "ConfigError: VLLM_LOGGING_LEVEL='loud'" in result.stderr


def test_an_unknown_variable_is_reported_once_per_process_on_one_line():
    code = LOG_ONE_LINE.format(level="info") * 2
    result = run_python(code, VLLM_LOGING_LEVEL="DEBUG")
    warnings = [line for line in result.stderr.splitlines() if "VLLM_LOGING_LEVEL" in line]
    assert len(warnings) == 1
    assert re.fullmatch(
        r"WARNING \S+ \S+ logger.py:\d+\] environment variable VLLM_LOGING_LEVEL is not known and "
        r"has no effect; did you mean VLLM_LOGGING_LEVEL\?",
        warnings[0],
    ), warnings[0]
    assert len(result.stderr.splitlines()) == 3


def test_a_process_that_another_one_has_started_does_not_report_variables_again():
    mark = {
        name: value
        for name, value in envs.child_environment({}, {}).items()
        if name not in os.environ
    }
    result = run_python(LOG_ONE_LINE.format(level="info"), VLLM_LOGING_LEVEL="DEBUG", **mark)
    assert len(result.stderr.splitlines()) == 1 and "VLLM_LOGING" not in result.stderr


def test_a_variable_without_effect_is_reported_once_with_the_reason():
    code = LOG_ONE_LINE.format(level="info") * 2
    result = run_python(
        code, VLLM_HPU_MULTI_MODEL_CONFIG="sesame", VLLM_USE_V1="1", VLLM_LINEAR_BUCKETING=""
    )
    first, *others = result.stderr.splitlines()
    assert first.endswith(
        "] environment variable VLLM_HPU_MULTI_MODEL_CONFIG has no effect: "
        "a server serves one model"
    )
    assert len(others) == 2 and not any("environment" in line for line in others)
    assert "sesame" not in result.stderr


def test_every_line_starts_with_the_prefix():
    code = LOG_ONE_LINE.format(level="info")
    result = run_python(code, VLLM_LOGGING_PREFIX="[100%] ")
    assert re.fullmatch(r"\[100%\] INFO \S+ \S+ <string>:3\] 3 tokens\n", result.stderr)


def test_logging_may_be_left_to_the_application():
    code = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="root: %(message)s", level="INFO")
""" + LOG_ONE_LINE.format(level="info")
    result = run_python(code, VLLM_CONFIGURE_LOGGING="0", VLLM_LOGGING_PREFIX="unused")
    assert (result.stdout, result.stderr) == ("root: 3 tokens\n", "")


LOGGING_CONFIG = {
    "version": 1,
    "formatters": {"short": {"format": "mine %(levelname)s %(message)s"}},
    "handlers": {
        "out": {
            "class": "logging.StreamHandler",
            "formatter": "short",
            "stream": "ext://sys.stdout",
        }
    },
    "loggers": {"vllm": {"handlers": ["out"], "level": "ERROR"}},
}


def test_a_file_configures_logging(tmp_path):
    path = tmp_path / "logging.json"
    path.write_text(json.dumps(LOGGING_CONFIG))
    code = LOG_ONE_LINE.format(level="info") + LOG_ONE_LINE.format(level="error")
    result = run_python(code, VLLM_LOGGING_CONFIG_PATH=str(path), VLLM_LOGGING_LEVEL="DEBUG")
    assert (result.stdout, result.stderr) == ("mine ERROR 3 tokens\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name"),
        ("[]", "it must contain a JSON object"),
        ("{}", "dictionary doesn't specify a version"),
        (
            json.dumps({**LOGGING_CONFIG, "handlers": {"out": {"class": "no.such.Handler"}}}),
            "Unable to configure handler 'out' (Cannot resolve 'no.such.Handler'",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_names_it(tmp_path, text, message):
    path = tmp_path / "logging.json"
    if text is not None:
        path.write_text(text)
    result = run_python(LOG_ONE_LINE.format(level="info"), VLLM_LOGGING_CONFIG_PATH=str(path))
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"vllm.errors.ConfigError: VLLM_LOGGING_CONFIG_PATH={str(path)!r}: ")
    assert message in last


def test_a_file_that_is_not_to_be_used_is_an_error():
    result = run_python(
        LOG_ONE_LINE.format(level="info"),
        VLLM_LOGGING_CONFIG_PATH="logging.json",
        VLLM_CONFIGURE_LOGGING="0",
    )
    assert (
        "VLLM_CONFIGURE_LOGGING=0, which turns the configuration"
    ) in result.stderr.splitlines()[-1]


def test_handlers_of_the_application_are_left_alone():
    code = """
import logging, sys
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("mine: %(message)s"))
logging.getLogger("vllm").addHandler(handler)
""" + LOG_ONE_LINE.format(level="warning")
    result = run_python(code)
    assert (result.stdout, result.stderr) == ("mine: 3 tokens\n", "")


def test_lines_follow_a_redirected_stderr():
    code = """
import contextlib, io
from vllm.logger import init_logger
logger = init_logger("vllm.module")
caught = io.StringIO()
with contextlib.redirect_stderr(caught):
    logger.info("inside")
print(caught.getvalue().endswith("inside\\n"))
"""
    result = run_python(code)
    assert (result.stdout, result.stderr) == ("True\n", "")


LOG_FAILURE = """
from vllm.logger import init_logger
logger = init_logger("vllm.some.module")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("two\\nlines", extra={"fields": {"status": 500}})
"""


def test_a_line_may_be_a_json_object():
    result = run_python(LOG_FAILURE, VLLM_LOGGING_FORMAT="json", VLLM_LOGGING_PREFIX="unused")
    (line,) = result.stderr.splitlines()
    record = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    assert "ZeroDivisionError" in record.pop("exception")
    assert record == {
        "level": "ERROR",
        "logger": "vllm.some.module",
        "place": "<string>:7",
        "message": "two\nlines",
        "status": 500,
    }


def test_the_format_may_change_and_be_shared():
    code = """
import logging
from vllm import logger
logger.init_logger("vllm.a")
logger.use_format("json")
logger.share_handlers("other")
logging.getLogger("other").warning("%d", 3)
"""
    (line,) = run_python(code).stderr.splitlines()
    assert json.loads(line)["message"] == "3"
