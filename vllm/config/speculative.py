"""Define settings of speculative decoding: how drafts of the next tokens are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vllm.config.arch.speculators import MAX_DRAFTS, SPECULATORS
from vllm.config.fields import check_at_least, check_one_of
from vllm.config.model import ModelConfig
from vllm.errors import ConfigError

DraftMethod = Literal[
    "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "mlp_speculator", "medusa"
]

_EXACT = "a draft token is accepted only if it equals the sampled token, so outputs do not change"
KEYS_WITHOUT_EFFECT: Mapping[str, str] = {
    "draft_tensor_parallel_size": (
        "the draft model always has the tensor parallel size of the model"
    ),
    "acceptance_method": _EXACT,
    "posterior_threshold": _EXACT,
    "posterior_alpha": _EXACT,
    "disable_logprobs": "every request that asks for log-probabilities gets them",
    "disable_mqa_scorer": "there is only one way to verify draft tokens",
}
"""Keys of `speculative_config` that are accepted and change nothing, and why."""
_OF_DRAFT_MODELS = ("model", "revision", "quantization", "max_model_len")
LOOKUP_DRAFTS = 32
"""Most drafts of a request in one step that are looked up in known text, unless the user or the
platform says less (`Platform.max_lookup_drafts`): they cost nothing to make."""
_DEFAULT_DRAFTS = {
    "ngram": LOOKUP_DRAFTS,
    "suffix": LOOKUP_DRAFTS,
    "draft_model": 4,
    **{name: row.num_drafts for name, row in SPECULATORS.items()},
}
_METHODS = tuple(_DEFAULT_DRAFTS)
_OTHER_NAMES = {"deepseek_mtp": "mtp"}


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Source and number of the drafts that a step verifies."""

    method: DraftMethod
    """Source of draft tokens. ngram: the tokens that followed the latest occurrence of the last
    tokens in the same request; suffix: also in the outputs of earlier requests; draft_model: a
    smaller model; the others: a network that reads hidden states of the model."""

    num_speculative_tokens: int = 0
    """Maximum number of draft tokens of a request in one step. 0: 32 for ngram and suffix (7 to 16
    on a Gaudi, by max_num_seqs), 2 for mtp, the number of heads for mlp_speculator and medusa, 4
    for the others."""

    prompt_lookup_min: int = 0
    """Number of last tokens that must have occurred before. 0: the smaller of 2 and
    prompt_lookup_max."""

    prompt_lookup_max: int = 0
    """Number of last tokens that are compared; the occurrence where most of them agree is used. 0:
    the larger of 8 and prompt_lookup_min."""

    suffix_cache_tokens: int = 1_000_000
    """Tokens of outputs that `suffix` remembers; about 200 bytes of memory each."""

    disable_by_batch_size: int = 0
    """Number of running requests above which no draft tokens are made. 0: no limit."""

    adaptive: bool = True
    """Make fewer draft tokens, or none, for a request whose drafts are often rejected, and when the
    step has so many tokens that a draft costs more time than it saves."""

    model: str | None = None
    """Folder or hub name of the draft model or speculator; only the methods that need one have this
    key and the ones below."""

    revision: str | None = None
    """Branch, tag or commit of the draft model on the hub."""

    quantization: str | None = None
    """Format that the weights of the draft model are rounded to, as in the flag --quantization."""

    max_model_len: int = 0
    """Number of tokens of a request after which it gets no more drafts. 0: as many as the draft
    model can process."""

    def __post_init__(self) -> None:
        check_one_of(self, "method", _METHODS)
        self._check_model()
        numbers = [f.name for f in fields(self) if f.type in ("int", int)]
        check_at_least(self, 0, *numbers)
        check_at_least(self, 1, "suffix_cache_tokens")
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"adaptive must be true or false, got {self.adaptive!r}")
        defaults = {
            "num_speculative_tokens": _DEFAULT_DRAFTS[self.method],
            "prompt_lookup_min": min(2, self.prompt_lookup_max or 2),
            "prompt_lookup_max": max(8, self.prompt_lookup_min),
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        if self.num_speculative_tokens > MAX_DRAFTS:
            raise ConfigError(
                f"num_speculative_tokens must be at most {MAX_DRAFTS}, got "
                f"{self.num_speculative_tokens}"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not exceed prompt_lookup_max "
                f"({self.prompt_lookup_max}). Lower the first or raise the second"
            )

    def _check_model(self) -> None:
        for name in _OF_DRAFT_MODELS[:-1]:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} must be a string, got {value!r}")
        if self.method == "draft_model" and not self.model:
            raise ConfigError(
                "the method draft_model needs the key 'model': the folder or the hub name of a "
                "smaller model with the same tokenizer"
            )
        row = SPECULATORS.get(self.method)
        if row is not None and row.has_files and not self.model:
            raise ConfigError(
                f"the method {self.method} needs the key 'model': the folder or the hub name of a "
                f"speculator that was made for the model"
            )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding."""

    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    """Speculative decoding settings (JSON): method (ngram, suffix, draft_model, eagle, eagle3, mtp,
    mlp_speculator or medusa), num_speculative_tokens, model, revision, quantization, max_model_len,
    prompt_lookup_min, prompt_lookup_max, suffix_cache_tokens, disable_by_batch_size, adaptive; see
    docs/speculative_decoding.md. Outputs do not change."""

    draft_model: ModelConfig | None = field(default=None, metadata={"cli": False})
    """The resolved model or speculator that makes draft tokens. None: there is none."""

    def __post_init__(self) -> None:
        _ = self.drafts  # raises if the settings contradict each other

    @property
    def method(self) -> str | None:
        """The requested method; None if there is none. A model without a method counts as a draft
        model until its config.json is read.
        """
        given = self.speculative_config
        if not given:
            return None
        method, model = given.get("method"), given.get("model")
        if method is None and model is not None:
            return "ngram" if model in ("ngram", "[ngram]") else "draft_model"
        if method is None:
            raise ConfigError(
                "speculative_config (also --num-speculative-tokens and "
                f"--ngram-prompt-lookup-max) needs the key 'method': {', '.join(_METHODS)}; for "
                'example {"method": "ngram", "num_speculative_tokens": 5}, or '
                "--speculative-model [ngram]"
            )
        return _OTHER_NAMES.get(str(method), str(method))

    @property
    def drafts(self) -> DraftOptions | None:
        """The draft settings with their defaults; None if there are no drafts.

        Raises:
            ConfigError: a key is not known, or its value is wrong.
        """
        method, given = self.method, dict(self.speculative_config)
        if method is None:
            return None
        names = [f.name for f in fields(DraftOptions)]
        if unknown := [name for name in given if name not in {*names, *KEYS_WITHOUT_EFFECT}]:
            raise ConfigError(
                f"speculative_config has the unknown key {', '.join(map(repr, unknown))}; "
                f"accepted: {', '.join(names)}"
            )
        options = {name: given[name] for name in names if given.get(name) is not None}
        if method in ("ngram", "suffix"):  # the model "[ngram]" also selects the method
            options = {n: value for n, value in options.items() if n not in _OF_DRAFT_MODELS}
        try:
            return DraftOptions(**{**options, "method": method})
        except ConfigError as error:
            raise ConfigError(f"speculative_config: {error}") from None
