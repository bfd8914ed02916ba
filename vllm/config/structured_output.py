"""Define settings of structured output: library, strictness, and limits for compiling grammars."""

from dataclasses import dataclass
from typing import Any

from vllm.config.fields import check_at_least
from vllm.errors import ConfigError

_BACKENDS = {
    "auto": "auto",
    "xgrammar": "xgrammar",
    "llguidance": "llguidance",
    "guidance": "llguidance",
    "outlines": "auto",
    "lm-format-enforcer": "auto",
}
"""Name in a request -> our name. The last two libraries are not used here; the others enforce the
same."""
_OPTIONS = {
    "no-fallback": "disable_fallback",
    "disable-any-whitespace": "disable_any_whitespace",
    "no-additional-properties": "disable_additional_properties",
}
"""An older way to set fields: "xgrammar:no-fallback,disable-any-whitespace"."""


def parse_backend(name: Any) -> tuple[str, set[str]]:
    """Return this package's name for a backend, and the options after its colon, as in
    "xgrammar:no-fallback".

    Raises:
        ValueError: it has no such form; the message begins after the name of the setting.
    """
    word, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
    options = [option.strip() for option in rest.split(",") if option.strip()]
    if word not in _BACKENDS or not all(option in _OPTIONS for option in options):
        raise ValueError(
            f"must be one of {', '.join(_BACKENDS)}, optionally with the options "
            f"{', '.join(_OPTIONS)} after a colon; got {name!r:.200}"
        )
    return _BACKENDS[word], {_OPTIONS[option] for option in options}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputConfig:
    """Defaults and limits of structured output."""

    guided_decoding_backend: str = "auto"
    """Library that makes outputs follow JSON schemas, regular expressions and grammars: xgrammar or
    llguidance. auto: the engine chooses for each request. guidance means llguidance; outlines and
    lm-format-enforcer mean auto. The next three settings may follow as options, as in
    xgrammar:no-fallback,disable-any-whitespace,no-additional-properties. A request may name another
    library."""

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
        try:
            parse_backend(self.guided_decoding_backend)
        except ValueError as error:
            raise ConfigError(f"guided_decoding_backend {error}") from None
        check_at_least(self, 0, "grammar_cache_bytes")
        if not 0 < self.grammar_compile_timeout <= 3600:
            raise ConfigError(
                f"grammar_compile_timeout must be above 0 and at most 3600 seconds, "
                f"got {self.grammar_compile_timeout}"
            )
