"""Read the JSON file of `QUANT_CONFIG`: FP8 measurement or quantization in the format of Intel
Neural Compressor.

Reads only this file, not the scales or layers.
"""

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm.errors import ConfigError
from vllm.utils.text.patterns import compile_pattern

IncMode = Literal["MEASURE", "QUANTIZE"]

Rounding = Literal["unit", "none", "pow2", "hw"]
"""Scales that a method allows: 1, all, powers of two, or the ones that the matrix engine applies
without cost."""


@dataclass(frozen=True)
class ScaleMethod:
    """One method of computing scales (`scale_method`)."""

    inputs: Rounding
    weights: Rounding
    is_per_output: bool = False
    """Weights have a scale for each output feature; else one."""
    is_searched: bool = False
    """The scale of weights is the one with the least squared error."""


SCALE_METHODS = {
    "unit_scale": ScaleMethod("unit", "unit"),
    "maxabs_arbitrary": ScaleMethod("none", "none"),
    "maxabs_pow2": ScaleMethod("pow2", "pow2"),
    "maxabs_pow2_opt_weight": ScaleMethod("pow2", "pow2", is_searched=True),
    "maxabs_hw": ScaleMethod("hw", "hw"),
    "maxabs_hw_opt_weight": ScaleMethod("hw", "hw", is_searched=True),
    "act_maxabs_pow2_weights_pcs_maxabs_pow2": ScaleMethod("pow2", "pow2", is_per_output=True),
    "act_maxabs_pow2_weights_pcs_opt_pow2": ScaleMethod(
        "pow2", "pow2", is_per_output=True, is_searched=True
    ),
    "act_maxabs_hw_weights_pcs_maxabs_pow2": ScaleMethod("hw", "pow2", is_per_output=True),
    "act_maxabs_hw_weights_pcs_opt_pow2": ScaleMethod(
        "hw", "pow2", is_per_output=True, is_searched=True
    ),
    "act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw": ScaleMethod("pow2", "hw"),
    "maxabs_pcs_pow2": ScaleMethod("pow2", "pow2", is_per_output=True),
}
"""Value of `scale_method` -> how scales are computed. The last two have no scales of inputs."""

MEASURED_SCALE_METHODS = tuple(SCALE_METHODS)[:-2]
_DYNAMIC = tuple(SCALE_METHODS)[-2:]

_WITHOUT_EFFECT = frozenset(
    {
        *("method", "scale_format", "hp_dtype", "use_qdq", "quantize_weight", "measure_on_hpu"),
        *("mod_dict", "seperate_measure_files", "verbose", "int4_weights", "dump_stats_xlsx_path"),
    }
)
"""Settings of the library that change neither measurements nor scales here."""

_OLD_NAMES = {"whitelist": "allowlist", "blacklist": "blocklist"}
"""Keys of older files, as Optimum for Habana publishes them -> their present names."""

_KNOWN = _WITHOUT_EFFECT | {
    *("mode", "observer", "scale_method", "dump_stats_path", "fp8_config", "measure_exclude"),
    *("allowlist", "blocklist", "dynamic_quantization", "device_for_scales", "scale_params"),
    *("ignore_modules_wo_measures", "recalc_scales", "calibration_sample_interval", "fake_quant"),
    "row_parallel_linear_allreduce_quantization",
}


_SCALE_PARAMS = {"input_backoff", "weight_backoff"}


@dataclass(frozen=True, kw_only=True)
class IncConfig:
    """The settings in a `QUANT_CONFIG` file."""

    path: str
    """Path of the file, for errors."""
    mode: IncMode
    scale_method: str = "maxabs_hw"
    """Method that computes scales from measured ranges; one of SCALE_METHODS."""
    dump_stats_path: str = "stats"
    """Beginning of the paths of the measurement files."""
    allowed_types: tuple[str, ...] = ()
    allowed_names: tuple[str, ...] = ()
    blocked_types: tuple[str, ...] = ()
    blocked_names: tuple[str, ...] = ()
    """Regular expressions, each for a part of a module name."""
    measures_outputs: bool = False
    device_for_scales: Literal["GAUDI2", "GAUDI3"] | None = None
    """Device whose e4m3 range scales are made for. None: the device that runs."""
    input_backoff: float = 0.25
    """Largest measured input, as a fraction of the range of e4m3."""
    weight_backoff: float = 0.5
    ignores_missing: bool = False
    """Whether a layer that was not measured runs unquantized. False: it is an error."""
    recalculates: bool = False
    """Whether scales are computed again even if there is a file with them."""
    assumes_measurements: bool = False
    """Whether the files of the measurement may be missing, because no weights are read: for a plan.
    Then no file is written either."""

    @property
    def is_dynamic(self) -> bool:
        """Whether each token has its own scale, so that nothing has to be measured."""
        return self.scale_method in _DYNAMIC

    def covers(self, name: str, *type_names: str) -> bool:
        """Return whether a module is measured or quantized.

        The lists of blocked and allowed names and types decide. A blocked module is not; if nothing
        is in the allowed lists, every other module is.

        Args:
            name: name of the module.
            type_names: names of its type, each of which may be in a list.
        """
        types = set(type_names)
        if types & set(self.blocked_types) or _is_match(name, self.blocked_names):
            return False
        if not self.allowed_types and not self.allowed_names:
            return True
        return bool(types & set(self.allowed_types)) or _is_match(name, self.allowed_names)


def _is_match(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def read_inc_config(path: str) -> IncConfig:
    """Read a file of `QUANT_CONFIG`.

    Raises:
        ConfigError: it cannot be read, or a value in it is wrong or not supported.
    """
    advice = "Set QUANT_CONFIG to a JSON file that `vllm calibrate` has written"
    given = read_json_object(path, "QUANT_CONFIG", advice)
    for old, name in _OLD_NAMES.items():
        if old in given and name not in given:
            given[name] = given.pop(old)
    reader = _Reader(path, given)
    for key in given:
        if key not in _KNOWN:
            raise reader.wrong(key, _advice_for_key(key))
    mode = reader.choice("mode", ("MEASURE", "QUANTIZE"), "QUANTIZE")
    reader.choice("observer", ("maxabs",), "maxabs")
    reader.choice("fp8_config", ("E4M3",), "E4M3")
    is_dynamic = reader.flag("dynamic_quantization")
    if reader.flag("fake_quant"):
        raise reader.wrong(
            "fake_quant",
            "remove the key: matrix multiplications run in real FP8, not in simulated FP8",
        )
    default = _DYNAMIC[0] if is_dynamic else "maxabs_hw"
    scale_method = reader.choice("scale_method", tuple(SCALE_METHODS), default)
    if is_dynamic != (scale_method in _DYNAMIC):
        wanted = _DYNAMIC if is_dynamic else MEASURED_SCALE_METHODS
        raise reader.wrong(
            "scale_method",
            f"with dynamic_quantization={str(is_dynamic).lower()} it must be one of "
            f"{', '.join(wanted)}",
        )
    if not str(given.get("calibration_sample_interval", 1)).isdecimal():
        raise reader.wrong(
            "calibration_sample_interval",
            "it must be an integer of at least 0. It has no effect: every step is measured, and "
            "the files are written at the end",
        )
    if reader.flag("row_parallel_linear_allreduce_quantization"):
        raise reader.wrong(
            "row_parallel_linear_allreduce_quantization",
            "remove the key: sums over cards are not quantized",
        )
    stats = given.get("dump_stats_path", "stats")
    if not isinstance(stats, str) or (not stats and not is_dynamic):
        raise reader.wrong("dump_stats_path", "it must be the beginning of a path")
    params = given.get("scale_params") or {}
    if not isinstance(params, Mapping) or not params.keys() <= _SCALE_PARAMS:
        known = " and ".join(sorted(_SCALE_PARAMS))
        raise reader.wrong(
            "scale_params", f"it must be an object, and its keys can only be {known}"
        )
    allowed, blocked = reader.module_list("allowlist"), reader.module_list("blocklist")
    device = reader.choice("device_for_scales", (None, "GAUDI2", "GAUDI3"), None)
    return IncConfig(
        path=path,
        mode=mode,
        scale_method=scale_method,
        dump_stats_path=stats,
        allowed_types=allowed[0],
        allowed_names=allowed[1],
        blocked_types=blocked[0],
        blocked_names=blocked[1],
        measures_outputs=reader.choice("measure_exclude", ("OUTPUT", "NONE"), "OUTPUT") == "NONE",
        device_for_scales=device,
        input_backoff=reader.share(params, "input_backoff", 0.25),
        weight_backoff=reader.share(params, "weight_backoff", 0.5),
        ignores_missing=reader.flag("ignore_modules_wo_measures"),
        recalculates=reader.flag("recalc_scales"),
    )


def read_json_object(path: str | Path, what: str, advice: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: path of the file.
        what: setting that names the file, or description of the file, for errors.
        advice: what to do if the file is missing or damaged.

    Raises:
        ConfigError: it cannot be read, is not JSON, or is not an object.
    """
    try:
        given = json.loads(Path(path).expanduser().read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}. {advice}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} {path} is not valid JSON: {error}. {advice}") from None
    if not isinstance(given, dict):
        kind = "a list" if isinstance(given, list) else json.dumps(given)[:40]
        raise ConfigError(f"{what} {path} must be a JSON object, got {kind}. {advice}")
    return given


def _advice_for_key(key: str) -> str:
    """Say what to do about a key that is not known."""
    if key in _OLD_NAMES:
        return f"it is the old name of {_OLD_NAMES[key]}, which the file has as well. Remove one"
    if key in _SCALE_PARAMS:
        return f'write it as "scale_params": {{"{key}": ...}}'
    if near := difflib.get_close_matches(key, _KNOWN, n=1):
        return f"did you mean {near[0]!r}?"
    return f"remove the key. Known keys: {', '.join(sorted(_KNOWN))}"


class _Reader:
    def __init__(self, path: str, given: Mapping[str, Any]) -> None:
        self.path = path
        self.given = given

    def wrong(self, key: str, accepted: str) -> ConfigError:
        return ConfigError(
            f"QUANT_CONFIG {self.path}: {key} is {self.given.get(key)!r}; {accepted}"
        )

    def choice(self, key: str, accepted: tuple[Any, ...], default: Any) -> Any:
        """Return one of the accepted values of a key; case does not matter."""
        value = self.given.get(key, default)
        for each in accepted:
            is_text = isinstance(value, str) and isinstance(each, str)
            if value is each or (is_text and value.lower() == each.lower()):
                return each
        named = ", ".join(str(each) for each in accepted if each is not None)
        raise self.wrong(key, f"supported: {named}")

    def flag(self, key: str) -> bool:
        value = self.given.get(key, False)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def share(self, params: Mapping[str, Any], key: str, default: float) -> float:
        value = params.get(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (math.isfinite(value) and 0 < value <= 1):
            raise self.wrong("scale_params", f"{key} must be above 0 and at most 1")
        return float(value)

    def module_list(self, key: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the types and the names of modules in a list."""
        value = self.given.get(key) or {}
        accepted = 'it must be {"types": [class names], "names": [parts of module names]}'
        if not isinstance(value, Mapping) or set(value) - {"types", "names"}:
            raise self.wrong(key, accepted)
        lists = [value.get(part) or [] for part in ("types", "names")]
        for entries in lists:
            if not isinstance(entries, list) or not all(isinstance(e, str) for e in entries):
                raise self.wrong(key, accepted)
        for pattern in lists[1]:
            try:
                compile_pattern(pattern)
            except ValueError as error:
                raise self.wrong(
                    key, f"the name {pattern!r} is not a regular expression: {error}"
                ) from None
        return tuple(lists[0]), tuple(lists[1])
