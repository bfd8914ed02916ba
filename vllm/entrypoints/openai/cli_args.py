"""Define the command line of the server: flags of the engine and the server, and a config file for
both.
"""

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config.fields import ConfigField, config_fields
from vllm.engine.arg_utils import EngineArgs, add_compat_flag, add_flag, describe_default
from vllm.engine.resolve.compat_args import CompatArgument, describe_refusal
from vllm.engine.resolve.newer_args import with_own_names
from vllm.entrypoints.shared.server_args import ServerArgs, from_settings
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.utils import FlexibleArgumentParser

logger = init_logger(__name__)

_ONE_API_PROCESS = "one API process serves all requests"
_LIMITS = "the server has limits of its own for the headers of a request"
_H11 = ("h11_max_header_count", "h11_max_incomplete_event_size")
_SWITCHES = (
    ("enable_tokenizer_info_endpoint", "there is no route /tokenizer_info"),
    ("enable_log_outputs", "only requests can be logged, with --log-requests"),
    ("enable_log_deltas", "only requests can be logged, with --log-requests"),
    ("log_error_stack", "the stack of an unexpected error is always logged"),
    ("trust_request_chat_template", "a request may always bring a chat template"),
    (
        "exclude_tools_when_tool_choice_none",
        "the tools of a request with tool_choice 'none' are never in its prompt",
    ),
)
SERVER_COMPAT: Mapping[str, CompatArgument] = {
    argument.name: argument
    for argument in (
        CompatArgument("api_server_count", 1, _ONE_API_PROCESS, available=True, aliases=("-asc",)),
        CompatArgument(
            "disable_frontend_multiprocessing",
            False,
            "the engine always runs in a process of its own",
            available=True,
        ),
        CompatArgument(
            "enable_server_load_tracking",
            False,
            "requests in progress are always counted",
            available=True,
        ),
        *(CompatArgument(name, False, reason, available=True) for name, reason in _SWITCHES),
        *(CompatArgument(name, None, _LIMITS, available=True) for name in _H11),
        CompatArgument(
            "disable_access_log_for_endpoints",
            None,
            "--disable-uvicorn-access-log turns the log of requests off",
            available=True,
        ),
        CompatArgument(
            "tool_server",
            None,
            "the server runs no tools; it returns the calls of the model to the client",
            available=False,
        ),
    )
}
"""Flags of the fork's server that have no effect here, or request a missing feature."""

_SERVER_FIELDS: Mapping[str, ConfigField] = {f.name: f for f in config_fields(ServerArgs)}


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add every flag of the server to a parser and return it; `read_args` reads the result."""
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="the model to serve; the same as --model"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with flags, without their dashes; flags of the command line have priority",
    )
    EngineArgs.add_cli_args(parser)
    # "resolve", because the server accepts some flags that the engine itself refuses.
    group = parser.add_argument_group(
        "ServerArgs", (ServerArgs.__doc__ or "").strip(), conflict_handler="resolve"
    )
    for field in _SERVER_FIELDS.values():
        _add_server_flag(group, field)
    for argument in SERVER_COMPAT.values():
        add_compat_flag(parser, argument)
    for action in parser._actions:
        # No defaults here: flags that are absent must differ from flags that are given with their
        # default value, because a config file may set the absent ones.
        if action.default is not argparse.SUPPRESS:
            action.default = None
    return parser


def _add_server_flag(group: argparse._ArgumentGroup, field: ConfigField) -> None:
    if field.kind != "strings":
        add_flag(group, field)
        return
    text = f"{field.help} {describe_default(field)}".replace("%", "%%")
    group.add_argument(field.flag, nargs="+", action="extend", metavar="TEXT", help=text)


def read_args(args: argparse.Namespace) -> tuple[EngineArgs, ServerArgs]:
    """Return the arguments of the engine and the server, from a parsed command line and its config
    file.

    Raises:
        ConfigError: arguments contradict each other, or request a missing feature.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    path = given.pop("config", None)
    if path is not None:
        given = {**_read_file(path), **given}
    model_tag = given.pop("model_tag", None)
    if model_tag is not None:
        model = given.get("model", model_tag) if args.model is not None else model_tag
        if model != model_tag:
            raise ConfigError(f"the model is given twice: {model_tag!r}, and --model {model!r}")
        given["model"] = model_tag
    given = with_own_names(given)
    for name, argument in SERVER_COMPAT.items():
        _take_compat(argument, given.pop(name, None))
    server = {name: given.pop(name) for name in _SERVER_FIELDS if name in given}
    engine = EngineArgs.from_cli_args(argparse.Namespace(**given))
    return engine, _read_server(server)


def serve_while_warming(engine: EngineArgs) -> None:
    """Let a server accept requests before all buckets are warmed up, unless the user chose
    otherwise.
    """
    is_complete = envs.get().VLLM_FULL_WARMUP or engine.sampling_warmup == "all"
    if engine.ready_when is None and not is_complete:
        engine.ready_when = "first"


def _read_server(given: dict[str, Any]) -> ServerArgs:
    settings = envs.get()
    if not given.get("api_key") and settings.VLLM_API_KEY:
        given["api_key"] = settings.VLLM_API_KEY
    if given.get("keep_alive_timeout") is None and settings.VLLM_HTTP_TIMEOUT_KEEP_ALIVE:
        given["keep_alive_timeout"] = settings.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if name in given:
            given[name] = _read_list(name, given[name])
    return dataclasses.replace(
        from_settings(given),
        dev_mode=settings.VLLM_SERVER_DEV_MODE,
        can_update_adapters=settings.VLLM_ALLOW_RUNTIME_LORA_UPDATING,
        adapters_folder=settings.VLLM_LORA_RESOLVER_CACHE_DIR,
        can_profile=bool(settings.VLLM_TORCH_PROFILER_DIR),
    )


def _read_list(name: str, given: Any) -> Any:
    """Read a list that is given as several words, or as one word of JSON as in the Gaudi fork."""
    if not (isinstance(given, list) and len(given) == 1 and given[0].lstrip().startswith("[")):
        return given
    try:
        return json.loads(given[0])
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} must be a list of strings: {error}") from None


def _take_compat(argument: CompatArgument, value: Any) -> None:
    if value is None or value == argument.off:
        return
    if not argument.available:
        raise ConfigError(describe_refusal(argument, value))
    logger.warning("%s=%s has no effect: %s", argument.name, value, argument.reason)


def _read_file(path: str) -> dict[str, Any]:
    """Read settings by name from a YAML file.

    Raises:
        ConfigError: the file cannot be read, or has a name that is not a flag.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the config file {path!r}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"the config file {path!r} must map names of flags to values")
    known = known_names()
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
            raise ConfigError(f"the config file {path!r} has the unknown flag {key!r}{hint}")
        if name in settings:
            raise ConfigError(f"the config file {path!r} has {key!r} twice")
        if value is not None:
            settings[name] = value
    if "model_tag" in settings:
        settings.setdefault("model", settings.pop("model_tag"))
    return settings


def known_names() -> list[str]:
    """Return the sorted names of all flags that a config file may set."""
    parser = make_arg_parser(FlexibleArgumentParser(add_help=False))
    return sorted({action.dest for action in parser._actions} - {"config"})


def exit_after_help(args: ServerArgs) -> None:
    """Print the known parser names and exit if the name of a parser is `help`."""
    listings = {"tool_call_parser": _tool_parsers, "reasoning_parser": _reasoning_parsers}
    for field, names in listings.items():
        if getattr(args, field) == "help":
            sys.stdout.write("\n".join(names()) + "\n")
            sys.exit(0)


def _tool_parsers() -> list[str]:
    from vllm.entrypoints.openai.tool_parsers import names

    return names()


def _reasoning_parsers() -> list[str]:
    from vllm.reasoning import names

    return names()
