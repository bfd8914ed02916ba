"""Check everything that can be checked before the server listens.

A mistake in a flag is reported within a second or two, before the port is announced. Nothing here
imports torch, transformers or the web framework, except modules that the user names.
"""

from typing import TYPE_CHECKING

from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def check_start(engine_args: "EngineArgs", args: ServerArgs) -> "VllmConfig | None":
    """Refuse flags with which a server cannot start.

    Returns:
        The config of the engine, or None if it is not known yet (`EngineArgs.create_early_config`).

    Raises:
        ConfigError: names the flag.
    """
    from vllm.entrypoints.server.tls import check_certificates

    check_certificates(args)
    _check_machines(engine_args, args)
    config = engine_args.create_early_config()
    _check_adapters(engine_args, args)
    if args.chat_template is not None:
        from vllm.entrypoints.openai.chat.template_flag import check_chat_template

        check_chat_template(args.chat_template)
    for name in args.middleware:
        from vllm.entrypoints.middleware.user_middleware import find_middleware

        find_middleware(name)
    if args.otlp_traces_endpoint is not None:
        from vllm.utils.otel import check_endpoint

        check_endpoint(args.otlp_traces_endpoint)
    if engine_args.allowed_local_media_path or engine_args.allowed_media_domains:
        from vllm.entrypoints.shared.media import make_fetcher

        make_fetcher(engine_args)
    if args.tool_parser_plugin or args.tool_call_parser or args.reasoning_parser:
        from vllm.entrypoints.openai.tool_parsers.manager import check_parser_flags

        check_parser_flags(args)
    return config


def _check_machines(engine_args: "EngineArgs", args: ServerArgs) -> None:
    """Refuse contradictory flags for replicas on several machines."""
    size, local = engine_args.data_parallel_size, engine_args.data_parallel_size_local
    start = engine_args.data_parallel_start_rank
    if not args.headless:
        if start:
            raise ConfigError(
                f"data_parallel_start_rank={start} is only possible with --headless, because "
                "a server always runs the first replicas itself. Add --headless, or leave "
                "data_parallel_start_rank out"
            )
        return
    if not start and (local is None or local == size):
        raise ConfigError(
            "--headless needs data_parallel_size (as on the server), data_parallel_size_local "
            "(replicas on this machine) and data_parallel_start_rank (index of the first one), "
            f"got {size}, {local} and 0"
        )


def _check_adapters(engine_args: "EngineArgs", args: ServerArgs) -> None:
    """Refuse LoRA adapters whose files cannot be used."""
    if not args.lora_modules:
        return
    if not engine_args.enable_lora:
        raise ConfigError(
            f"lora_modules={' '.join(args.lora_modules)} needs enable_lora=True: give both, or "
            "neither"
        )
    from vllm.entrypoints.shared.served_adapters import ServedAdapters

    names = engine_args.served_model_name or ()
    try:
        ServedAdapters(args.lora_modules, names, engine_args.max_lora_rank)
    except RequestError as error:
        raise ConfigError(f"lora_modules: {error}") from None
