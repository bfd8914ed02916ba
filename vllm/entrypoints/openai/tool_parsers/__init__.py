"""Find the tool calls in a model's output text."""

from vllm.entrypoints.openai.tool_parsers.base import ParsedDelta, ToolParser
from vllm.entrypoints.openai.tool_parsers.manager import ToolParserManager
from vllm.entrypoints.openai.tool_parsers.marked import (
    Granite20bToolParser,
    GraniteToolParser,
    HermesToolParser,
    InternLMToolParser,
    JambaToolParser,
    LlamaJsonToolParser,
    MistralToolParser,
)
from vllm.entrypoints.openai.tool_parsers.pythonic import (
    Llama4PythonicToolParser,
    PythonicToolParser,
)

__all__ = [
    "Granite20bFCToolParser",
    "GraniteToolParser",
    "Hermes2ProToolParser",
    "Internlm2ToolParser",
    "JambaToolParser",
    "Llama3JsonToolParser",
    "Llama4PythonicToolParser",
    "MistralToolParser",
    "ParsedDelta",
    "PythonicToolParser",
    "ToolParser",
    "ToolParserManager",
    "names",
]

names = ToolParserManager.names
"""Names of all parsers in alphabetical order."""

# Names of these classes in vLLM.
Granite20bFCToolParser = Granite20bToolParser
Hermes2ProToolParser = HermesToolParser
Internlm2ToolParser = InternLMToolParser
Llama3JsonToolParser = LlamaJsonToolParser
