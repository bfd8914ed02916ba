"""Checks the server's flags that name parsers, before anything is served."""

from vllm.entrypoints.openai.tool_parsers.manager import ToolParserManager
from vllm.entrypoints.server.server_args import ServerArgs
from vllm.reasoning import ReasoningParserManager


def check_parser_flags(args: ServerArgs) -> None:
    """Load the plug-ins that there are, and find the parsers.

    Raises:
        ConfigError: a plug-in cannot be used, or there is no parser of a name.
    """
    if args.tool_parser_plugin is not None:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin is not None:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    if args.tool_call_parser is not None:
        ToolParserManager.get(args.tool_call_parser)
    if args.reasoning_parser is not None:
        ReasoningParserManager.get(args.reasoning_parser)
