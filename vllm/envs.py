"""Environment variables: the only module that reads `os.environ`.

One field is one variable: name, type, default and help in one place. Settings a user tunes
per deployment are config fields; a variable is for what must be known before a config exists
(logging, cache folders, device selection) or is part of the compatibility surface.
Values arrive where they are used inside a config dataclass. Knows no logging: the logger, which
needs a level from here, also reports the names that are not known.
"""

import difflib
import math
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from vllm.errors import ConfigError

_PREFIX = "VLLM_"


def env(
    default: Any, help: str, choices: tuple[str, ...] = (), at_least: float | None = None
) -> Any:
    """Declare one variable. A default of None means "not set"."""
    metadata = {"help": help, "choices": choices, "at_least": at_least}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Envs:
    """Every variable the package reads."""

    VLLM_TARGET_DEVICE: str | None = env(
        None,
        "Device to install and run for. Not set: hpu when a card is there, else cpu.",
        ("hpu", "cpu"),
    )
    VLLM_LOGGING_LEVEL: str = env(
        "INFO", "Level of the 'vllm' logger.", ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    )
    VLLM_CPU_KVCACHE_SPACE: float | None = env(
        None,
        "KV cache of the CPU device in GiB. Not set, or 0: a share of the free memory.",
        at_least=0,
    )
    VLLM_CPU_KERNELS: bool = env(True, "Use the compiled kernels on the CPU; 0 runs plain torch.")
    VLLM_HPU_SIM: str | None = env(
        None,
        "Simulate this card: a device `hpu` that computes on the CPU and counts what a card pays.",
        ("gaudi2", "gaudi3"),
    )
    VLLM_USE_FAKE_HPU: bool = env(False, "The same as VLLM_HPU_SIM=gaudi2.")
    VLLM_HPU_SIM_STRICT: bool = env(
        False, "Simulated card: a compilation, host sync or dynamic shape in a warmed step fails."
    )
    PT_HPU_LAZY_MODE: bool | None = env(
        None,
        "Read by the Habana bridge: 1 is lazy (HPU graphs), 0 is eager (torch.compile). "
        "Not set: the default of the bridge; of a simulated card 0.",
    )
    VLLM_USE_V1: bool = env(True, "Accepted for compatibility: there is one engine.")

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> "Envs":
        """Read every declared variable once; an empty value means "not set".

        Raises:
            ConfigError: a value does not parse; names variable, value and accepted form.
        """
        environ = os.environ if environ is None else environ
        types = typing.get_type_hints(cls)
        values = {
            f.name: _parse(f.name, environ[f.name], types[f.name], f.metadata)
            for f in fields(cls)
            if environ.get(f.name, "").strip()
        }
        return cls(**values)


_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def _parse(name: str, raw: str, annotation: Any, metadata: Mapping[str, Any]) -> Any:
    options = [a for a in typing.get_args(annotation) if a is not type(None)]
    type_ = options[0] if options else annotation
    text = raw.strip()
    if choices := metadata["choices"]:
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise ConfigError(f"{name}={raw!r}: expected one of {', '.join(choices)}")
    try:
        value = _WORDS[text.lower()] if type_ is bool else type_(text)
        if type_ is float and not math.isfinite(value):
            raise ValueError
    except (KeyError, ValueError):
        accepted = {bool: "0, 1, true or false", int: "an integer", float: "a number"}[type_]
        raise ConfigError(f"{name}={raw!r}: expected {accepted}") from None
    at_least = metadata["at_least"]
    if at_least is not None and value < at_least:
        raise ConfigError(f"{name}={raw!r}: expected at least {at_least}")
    return value


@cache
def get() -> Envs:
    """The environment of this process, read at the first call."""
    return Envs.load()


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """`VLLM_*` names that are set but not declared -> the nearest declared name, if one is near."""
    environ = os.environ if environ is None else environ
    declared = [f.name for f in fields(Envs) if f.name.startswith(_PREFIX)]
    known = [name.removeprefix(_PREFIX) for name in declared]
    nearest: dict[str, str | None] = {}
    for name in sorted(k.removeprefix(_PREFIX) for k in environ if k.startswith(_PREFIX)):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            nearest[_PREFIX + name] = _PREFIX + near[0] if near else None
    return nearest


_SECRET_ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def reportable(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every `VLLM_*` or declared variable that is set, for a bug report: secrets are masked."""
    environ = os.environ if environ is None else environ
    declared = {f.name for f in fields(Envs)}
    return {
        name: "***" if name.endswith(_SECRET_ENDINGS) else environ[name]
        for name in sorted(environ)
        if name.startswith(_PREFIX) or name in declared
    }
