"""Structured output: which library, how strict, and what compiling a grammar may cost."""

from dataclasses import dataclass
from typing import Literal, get_args

from vllm.config.fields import check_at_least, check_one_of
from vllm.errors import ConfigError

GuidedDecodingBackend = Literal[
    "auto", "xgrammar", "llguidance", "guidance", "outlines", "lm-format-enforcer"
]


@dataclass(frozen=True, kw_only=True)
class StructuredOutputConfig:
    """Defaults and limits of structured output."""

    guided_decoding_backend: GuidedDecodingBackend = "auto"
    """Library that enforces JSON schemas, regular expressions and grammars. auto: by what the
    request needs; guidance is llguidance, outlines and lm-format-enforcer are auto. A request may
    ask for another one."""

    guided_decoding_disable_fallback: bool = False
    """Refuse what the chosen library does not enforce, instead of taking the other one."""

    guided_decoding_disable_any_whitespace: bool = False
    """JSON without whitespace that it does not need."""

    guided_decoding_disable_additional_properties: bool = False
    """JSON objects have the properties that their schema names and no others, unless the schema
    says otherwise by additionalProperties."""

    grammar_compile_timeout: float = 10.0
    """Seconds after which compiling the grammar of a request is given up and the request
    refused."""

    grammar_cache_bytes: int = 64 * 2**20
    """Bytes of compiled grammars that are kept for the next requests."""

    def __post_init__(self) -> None:
        check_one_of(self, "guided_decoding_backend", get_args(GuidedDecodingBackend))
        check_at_least(self, 0, "grammar_cache_bytes")
        if not 0 < self.grammar_compile_timeout <= 3600:
            raise ConfigError(
                f"grammar_compile_timeout must be above 0 and at most 3600 seconds, "
                f"got {self.grammar_compile_timeout}"
            )
