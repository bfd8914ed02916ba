"""Sampling parameters of a request, checked when they are created. Independent of torch and the
engine."""

import copy
import math
import operator
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, IntEnum, auto
from numbers import Integral, Real
from typing import Annotated, Any, get_args, get_origin

import msgspec

from vllm.errors import RequestError
from vllm.guided_decoding_params import (
    GuidedDecodingParams,
    StructuredOutputsParams,
    read_guided_decoding,
)

_LEAST_TOP_P = 1e-6
"""Used for smaller values. At least one token is always kept, and OpenAI's API accepts 0."""
_SAMPLING_EPS = 1e-5
_MIN_TEMPERATURE = 0.01
_MAX_BIAS = 100.0
_MAX_INTEGER = 2**63 - 1
"""The largest integer of 64 bits, as in messages between processes."""
_LARGEST_FLOAT = sys.float_info.max
_MAX_QUALNAME_CHARS = 256
_MAX_SHOWN_CHARS = 100
_END_TOKENS = "_end_token_ids"
"""Attribute for the end tokens of the model. It is not a field, so that they are not shown as the
user's."""


class RequestOutputKind(IntEnum):
    """The content of each intermediate output of a request."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only the new text and tokens since the last output."""
    FINAL_ONLY = 2
    """Nothing until the request has finished."""


class Interface(Flag):
    """The interfaces through which users set numeric `SamplingParams`."""

    NONE = 0
    API = auto()
    """The bodies of completions, chat, responses and transcriptions, all under its own name."""
    MODEL = auto()
    """generation_config.json of a model: its value is the default there."""
    PAGE = auto()
    """The settings of the chat page."""
    ALL = API | MODEL | PAGE


_OF_REQUESTS = Interface.API | Interface.PAGE


@dataclass(frozen=True)
class NumberRange:
    """The range of a sampling parameter, and the interfaces that set it; annotation of its field.

    `NUMBERS` has them by name, with the last three attributes, which follow from the field.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    set_by: Interface = Interface.NONE
    kind: type[int] | type[float] = float
    is_optional: bool = False
    """None is accepted."""
    default: float | None = None

    def read(self, name: str, value: Any) -> float | None:
        """Check a value of the user, and return it as a Python number.

        Numpy numbers pass the checks, but only Python numbers can be sent to another process.

        Raises:
            RequestError: it is out of range or of the wrong type.
        """
        if value is None and self.is_optional:
            return None
        if self.kind is float:
            _check_range(
                name, value, above=self.above, at_least=self.at_least, at_most=self.at_most
            )
            return float(value)
        _check_integer(name, value, at_least=self.at_least, at_most=self.at_most)
        if int(value) > _MAX_INTEGER:
            raise RequestError(f"{name} must be at most {_MAX_INTEGER}", param=name)
        return int(value)


class SamplingType(IntEnum):
    """The method of choosing the next token."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class LogitsProcessorConstructor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A logits processor that the engine core creates by importing a callable and calling it.

    Args:
        qualname: "module.name" of a function or class.
        args, kwargs: JSON values to call it with; the result is the processor.

    Raises:
        RequestError: (a ValueError) one of them has the wrong type.
    """

    qualname: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_qualname(self.qualname)
        for name, kind, word in (("args", list, "list"), ("kwargs", dict, "JSON object")):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise _processor_error(f"{name} of {self.qualname!r} must be a {word}", value)
        try:
            msgspec.msgpack.encode([self.args, self.kwargs])
        except (TypeError, OverflowError, RecursionError, ValueError) as error:
            raise RequestError(
                f"logits_processors: args and kwargs of {self.qualname!r} must be JSON values with "
                f"integers of at most 64 bits: {error}",
                param="logits_processors",
            ) from None


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Parameters for sampling one request.

    Args:
        n: outputs per prompt.
        best_of: number of outputs that are sampled. The `n` outputs with the highest cumulative
            log-probability are returned, the most likely first. None: `n`.
        presence_penalty: subtracted from logits of tokens in the output so far; [-2, 2].
        frequency_penalty: subtracted once for each occurrence of a token in the output so far;
            [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in the
            prompt or output; above 0, 1 is off (CTRL, arXiv:1909.05858). A prompt of embeddings
            has no tokens: as in transformers, only the output counts.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of tokens with this probability; [0, 1] (arXiv:1904.09751). 0
            keeps only the most likely token.
        top_k: keep the k most likely tokens; 0 or -1 is off.
        min_p: drop tokens whose probability is below this fraction of the most likely token's;
            [0, 1] (arXiv:2407.01082).
        seed: makes the request reproducible whatever it is batched with; -1 is None.
        stop: strings that end the output; left out of the text unless
            `include_stop_str_in_output`.
        stop_token_ids: token ids that end the output, in addition to the model's end tokens.
        bad_words: words that may not be generated.
        ignore_eos: continue after an end-of-sequence token.
        max_tokens: output tokens at most; None is up to `max_model_len`.
        min_tokens: no end token before this many output tokens.
        logprobs: number of most likely tokens per position whose log-probabilities are returned,
            in addition to the sampled token. 0: only the sampled token. None: off.
        prompt_logprobs: likewise for the tokens of the prompt.
        detokenize: produce text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between special tokens in the text.
        logits_processors: callables `f(output_ids, logits)` or
            `f(prompt_ids, output_ids, logits)`, logits [vocab_size] float32 -> the same. An engine
            with `logits_processor_pattern` also takes "module.name" of such a callable, and
            `LogitsProcessorConstructor` or the same as a dict.
        truncate_prompt_tokens: keep the last k prompt tokens.
        output_kind: what intermediate outputs hold.
        logit_bias: token id -> value added to its logit.
        allowed_token_ids: only these may be generated.
        extra_args: passed on to plug-ins.
        structured_outputs: another name of `guided_decoding`, which has the value afterwards.
        kept_special_token_ids: special tokens whose text `skip_special_tokens` does not leave out.

    Raises:
        RequestError: (a ValueError) a value is out of range or of the wrong type; names the field.
        TypeError: `top_k` is not an integer.
    """

    n: Annotated[int, NumberRange(at_least=1)] = 1
    best_of: Annotated[int | None, NumberRange(at_least=1)] = None
    presence_penalty: Annotated[float, NumberRange(-2, at_most=2, set_by=_OF_REQUESTS)] = 0.0
    frequency_penalty: Annotated[float, NumberRange(-2, at_most=2, set_by=_OF_REQUESTS)] = 0.0
    repetition_penalty: Annotated[float, NumberRange(above=0, set_by=Interface.ALL)] = 1.0
    temperature: Annotated[float, NumberRange(at_least=0, set_by=Interface.ALL)] = 1.0
    top_p: Annotated[float, NumberRange(at_least=0, at_most=1, set_by=Interface.ALL)] = 1.0
    top_k: Annotated[int, NumberRange(at_least=-1, set_by=Interface.ALL)] = 0
    min_p: Annotated[float, NumberRange(at_least=0, at_most=1, set_by=Interface.ALL)] = 0.0
    seed: Annotated[
        int | None, NumberRange(-(2**63), at_most=_MAX_INTEGER, set_by=_OF_REQUESTS)
    ] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: Annotated[
        int | None, NumberRange(at_least=1, set_by=Interface.MODEL | Interface.PAGE)
    ] = 16
    min_tokens: Annotated[int, NumberRange(at_least=0)] = 0
    logprobs: Annotated[int | None, NumberRange(at_least=0)] = None
    prompt_logprobs: Annotated[int | None, NumberRange(at_least=0)] = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    # Any: callables are not sent to other processes; names are strings or
    # `LogitsProcessorConstructor`.
    logits_processors: list[Any] | None = None
    truncate_prompt_tokens: Annotated[int | None, NumberRange(at_least=1)] = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    guided_decoding: GuidedDecodingParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    kept_special_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self._normalize()
        self._check_numbers()
        self.check_ranking()
        self._check_lists()
        self.top_p = max(self.top_p, _LEAST_TOP_P)
        if self.temperature < _SAMPLING_EPS:
            if self.num_sampled > 1:
                name = "n" if self.n > 1 else "best_of"
                raise RequestError(
                    f"{name} must be 1 when using greedy sampling (temperature 0), "
                    f"got {getattr(self, name)}",
                    param=name,
                )
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < _MIN_TEMPERATURE:
            warnings.warn(
                f"temperature {self.temperature} is raised to {_MIN_TEMPERATURE}: "
                "smaller values overflow",
                stacklevel=2,
            )
            self.temperature = _MIN_TEMPERATURE

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Create parameters from fields, any of which may be None for its default.

        `logit_bias` may have token ids as strings, as in JSON; values are clamped to [-100, 100].
        """
        if (bias := values.get("logit_bias")) is not None:
            values["logit_bias"] = _read_logit_bias(bias)
        keep_none = {"max_tokens"}
        return cls(**{k: v for k, v in values.items() if v is not None or k in keep_none})

    @property
    def num_sampled(self) -> int:
        """Outputs that are sampled per prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more outputs are sampled than returned (`best_of`)."""
        return self.num_sampled > self.n

    def check_ranking(self) -> None:
        """Check that the output kind is possible with `best_of`; an engine calls it again.

        Raises:
            RequestError: (a ValueError) deltas are requested of outputs that may not be returned.
        """
        if self.is_ranked and self.output_kind is RequestOutputKind.DELTA:
            raise RequestError(
                f"best_of ({self.best_of}) must be n ({self.n}) with output_kind DELTA: ranking "
                f"needs complete outputs",
                param="best_of",
            )

    @property
    def sampling_type(self) -> SamplingType:
        """The method of choosing tokens: greedy, random, or random with a seed."""
        if self.temperature < _SAMPLING_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def restricting_fields(self) -> list[str]:
        """Names of the set fields that forbid tokens, as the user wrote them."""
        found = [
            name
            for name in ("allowed_token_ids", "bad_words", "logit_bias", "logits_processors")
            if getattr(self, name)
        ]
        if self.min_tokens > 0:
            found.append("min_tokens")
        if (guided := self.guided_decoding) is not None:
            found.append(guided.field or "guided_decoding")
        return found

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Token ids that end the output: the user's, and the model's.

        The model's are set by `update_from_generation_config`.
        """
        of_model = () if self.ignore_eos else self.__dict__.get(_END_TOKENS, ())
        return {*(self.stop_token_ids or ()), *of_model}

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Add the end tokens of a model.

        They are then part of `all_stop_token_ids`, unless `ignore_eos` is set; the user's
        `stop_token_ids` do not change. A second call replaces the tokens of the first. An engine
        does not need this for its own model.

        Args:
            generation_config: content of generation_config.json, of which `eos_token_id` is read:
                one id, several, or None.
            model_eos_token_id: the end token of the tokenizer; None: it has none.

        Raises:
            RequestError: (a ValueError) one of them is not a token id.
        """
        found = generation_config.get("eos_token_id")
        given = list(found) if isinstance(found, (list, tuple, set, frozenset)) else [found]
        ids = [token_id for token_id in (model_eos_token_id, *given) if token_id is not None]
        _check_token_ids("eos_token_id", ids)
        self.__dict__[_END_TOKENS] = frozenset(map(int, ids))

    def clone(self) -> "SamplingParams":
        """Return an independent copy; logits processors are shared, not copied."""
        memo = {id(p): p for p in self.logits_processors or ()}
        own = copy.deepcopy(self, memo)
        own.__dict__.update(self.__dict__)
        return own

    def _normalize(self) -> None:
        if self.seed == -1:
            self.seed = None
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = _as_list("stop", self.stop) or []
        self.stop_token_ids = _as_list("stop_token_ids", self.stop_token_ids) or []
        self.bad_words = _as_list("bad_words", self.bad_words) or []
        self.allowed_token_ids = _as_list("allowed_token_ids", self.allowed_token_ids)
        self.guided_decoding = read_guided_decoding(self.guided_decoding, self.structured_outputs)
        self.structured_outputs = None
        self.logits_processors = _as_list("logits_processors", self.logits_processors)
        if self.logits_processors is not None:
            self.logits_processors = [_read_processor(p) for p in self.logits_processors]
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise RequestError(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r}",
                param="output_kind",
            ) from None

    def _check_numbers(self) -> None:
        if not isinstance(self.top_k, Integral) or isinstance(self.top_k, bool):
            raise TypeError(f"top_k must be an integer, got {self.top_k!r}")
        for name, kind, low, high, is_optional in _USUAL_NUMBERS:
            value = getattr(self, name)
            if type(value) is kind:
                if low <= value <= high:
                    continue
            elif value is None and is_optional:
                continue
            setattr(self, name, NUMBERS[name].read(name, value))
        for name in _BOOLS:
            if type(value := getattr(self, name)) is not bool:
                setattr(self, name, _as_bool(name, value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                f"best_of must be at least n ({self.n}), got {self.best_of}", param="best_of"
            )

    def _check_lists(self) -> None:
        _check_strings("stop", self.stop)
        _check_strings("bad_words", self.bad_words)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        self.stop_token_ids = list(map(int, self.stop_token_ids or ()))
        _check_token_ids("kept_special_token_ids", self.kept_special_token_ids)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
            self.allowed_token_ids = list(map(int, self.allowed_token_ids))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise RequestError(
                    f"logit_bias must map token ids to numbers, got {self.logit_bias!r}",
                    param="logit_bias",
                )
            _check_token_ids("logit_bias", list(self.logit_bias))
            for token_id, bias in self.logit_bias.items():
                _check_range(f"logit_bias[{token_id}]", bias, at_least=-math.inf, at_most=math.inf)


def _declared_numbers() -> dict[str, NumberRange]:
    """Return the numeric fields of `SamplingParams` with their ranges, in their order."""
    numbers = {}
    for field in msgspec.structs.fields(SamplingParams):
        if get_origin(field.type) is Annotated:
            declared, number = get_args(field.type)
            kinds = get_args(declared) or (declared,)
            numbers[field.name] = replace(
                number, kind=kinds[0], is_optional=type(None) in kinds, default=field.default
            )
    return numbers


NUMBERS = _declared_numbers()
"""The sampling parameters that are numbers, by name."""


def numbers_of(interface: Interface) -> dict[str, NumberRange]:
    """Return the sampling parameters that one interface sets, by name."""
    return {name: number for name, number in NUMBERS.items() if interface in number.set_by}


_USUAL_NUMBERS = tuple(
    (
        name,
        number.kind,
        number.at_least if number.above is None else math.nextafter(number.above, math.inf),
        (_LARGEST_FLOAT if number.kind is float else _MAX_INTEGER)
        if number.at_most is None
        else number.at_most,
        number.is_optional,
    )
    for name, number in NUMBERS.items()
)
"""Name, type, least and largest value, and whether None is accepted, of numbers without further
rules."""
_BOOLS = tuple(field.name for field in msgspec.structs.fields(SamplingParams) if field.type is bool)


class BeamSearchParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_integer("beam_width", self.beam_width, at_least=1)
        _check_integer("max_tokens", self.max_tokens, at_least=1)
        _check_range("temperature", self.temperature, at_least=0)
        _check_range("length_penalty", self.length_penalty)


def _check_range(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Check that a value is a number in the range; NaN is in no range."""
    if (
        type(value) in (float, int)
        and (above is None or value > above)
        and (-_LARGEST_FLOAT if at_least is None else at_least) <= value
        and value <= (_LARGEST_FLOAT if at_most is None else at_most)
    ):
        return  # the usual case; otherwise each value is checked, to find the one for the message
    if not isinstance(value, Real) or isinstance(value, bool):
        raise RequestError(f"{name} must be a number, got {value!r}", param=name)
    try:
        number = float(value)
    except OverflowError:  # an integer too large for a float
        raise RequestError(f"{name} must be a number that a float can hold", param=name) from None
    tests = [
        (above is None or number > above, f"above {above}"),
        (at_least is None or number >= at_least, f"at least {at_least}"),
        (at_most is None or number <= at_most, f"at most {at_most}"),
    ]
    is_endless = math.isinf(number) and at_most is None
    if math.isnan(number) or is_endless or not all(good for good, _ in tests):
        bounds = " and ".join(text for _, text in tests if not text.endswith("None"))
        raise RequestError(
            f"{name} must be a finite number{bounds and ' '}{bounds}, got {value}", param=name
        )


def _check_integer(
    name: str, value: Any, *, at_least: float | None, at_most: float | None = None
) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    is_low = at_least is not None and int(value) < at_least
    if is_low or (at_most is not None and int(value) > at_most):
        upper = f" and at most {at_most}" if at_most is not None else ""
        raise RequestError(f"{name} must be at least {at_least}{upper}, got {value}", param=name)


def _as_bool(name: str, value: Any) -> bool:
    """Convert to a Python bool; numpy bools, 0 and 1 are accepted as well."""
    try:
        if not isinstance(value, (str, bytes)) and value in (0, 1):
            return bool(value)
    except (TypeError, ValueError, RecursionError):
        pass  # reported below
    raise RequestError(f"{name} must be true or false, got {type(value).__name__}", param=name)


def _as_list(name: str, values: Any) -> list[Any] | None:
    """Return a new list of the values; None stays None."""
    if values is None:
        return None
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {values!r}", param=name)
    return list(values)


def _read_processor(value: Any) -> Any:
    """Return a logits processor from a user's value: a callable, qualified name, or constructor."""
    if isinstance(value, str):
        _check_qualname(value)
        return value
    if isinstance(value, Mapping):
        try:
            return LogitsProcessorConstructor(**value)
        except TypeError:
            raise _processor_error(
                "an object must have qualname, and may have args and kwargs", value
            ) from None
    if not callable(value) and not isinstance(value, LogitsProcessorConstructor):
        raise _processor_error("each must be a callable or a qualified name", value)
    return value


def _check_qualname(name: Any) -> None:
    is_name = isinstance(name, str) and len(name) <= _MAX_QUALNAME_CHARS
    if not is_name or "." not in name or not all(map(str.isidentifier, name.split("."))):
        raise _processor_error(
            "each must be a callable or a qualified name such as 'module.function'", name
        )


def _processor_error(expected: str, value: Any) -> RequestError:
    shown = repr(value)
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = shown[:_MAX_SHOWN_CHARS] + "..."
    return RequestError(f"logits_processors: {expected}, got {shown}", param="logits_processors")


def _read_logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(
            f"logit_bias must map token ids to numbers, got {bias!r}", param="logit_bias"
        )
    read = {}
    for token_id, value in bias.items():
        try:
            key = int(token_id) if isinstance(token_id, str) else operator.index(token_id)
        except (TypeError, ValueError):
            raise RequestError(
                f"logit_bias must have token ids as keys, got {token_id!r}", param="logit_bias"
            ) from None
        _check_range(f"logit_bias[{key}]", value, at_least=-math.inf, at_most=math.inf)
        read[key] = min(_MAX_BIAS, max(-_MAX_BIAS, float(value)))
    return read


def _check_strings(name: str, values: Sequence[Any] | None) -> None:
    for value in values or ():
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} must hold non-empty strings, got {value!r}", param=name)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{name} has {value!r}, which is not valid text: {error.reason}", param=name
            ) from None


def _check_token_ids(name: str, values: Sequence[Any] | None) -> None:
    if not values or (set(map(type, values)) == {int} and min(values) >= 0):
        return  # the usual case: it checks lists of a million ids within milliseconds
    for value in values:
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 0:
            raise RequestError(
                f"{name} must hold token ids (integers >= 0), got {value!r}", param=name
            )
