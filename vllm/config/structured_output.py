"""Define settings of structured output: library, strictness, and limits for compiling grammars."""

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
    """Library that makes outputs follow JSON schemas, regular expressions and grammars. auto: the
    engine chooses for each request. guidance means llguidance; outlines and lm-format-enforcer mean
    auto. A request may name another one."""

    guided_decoding_disable_fallback: bool = False
    """Refuse a request if the chosen library does not support its constraint. False: use the other
    library."""

    guided_decoding_disable_any_whitespace: bool = False
    """Generate JSON without optional whitespace."""

    guided_decoding_disable_additional_properties: bool = False
    """Allow only the properties that a JSON schema names, unless the schema sets
    additionalProperties."""

    grammar_compile_timeout: float = 10.0
    """Maximum number of seconds to compile the grammar of a request. If it takes longer, the
    request is refused."""

    grammar_cache_bytes: int = 64 * 2**20
    """Size in bytes of the cache of compiled grammars."""

    def __post_init__(self) -> None:
        check_one_of(self, "guided_decoding_backend", get_args(GuidedDecodingBackend))
        check_at_least(self, 0, "grammar_cache_bytes")
        if not 0 < self.grammar_compile_timeout <= 3600:
            raise ConfigError(
                f"grammar_compile_timeout must be above 0 and at most 3600 seconds, "
                f"got {self.grammar_compile_timeout}"
            )
