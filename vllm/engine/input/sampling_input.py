"""Check the sampling parameters of a request against the model and the engine, and tokenise the
parameters that are strings.
"""

from collections.abc import Collection, Sequence

from vllm.config import VllmConfig
from vllm.engine.input.named_processors import NamedProcessors
from vllm.engine.input.prompt_embeds import needs_tokens
from vllm.engine.input.prompt_tokenizer import PromptTokenizer
from vllm.errors import RequestError
from vllm.sampling_params import SamplingParams
from vllm.structured_output.spec import field_of, make_spec


class SamplingInput:
    """Checks sampling parameters for one engine.

    Args:
        config: complete and consistent config.
        prompts: has the tokenizer and its end tokens.
    """

    def __init__(self, config: VllmConfig, prompts: PromptTokenizer) -> None:
        self._prompts = prompts
        self._vocab_size = config.model.resolved_arch.vocab_size
        self._max_logprobs = config.model.max_logprobs
        self._named_processors = NamedProcessors(config.model.logits_processor_pattern)
        self._structured_output = config.structured_output
        self._bad_words: tuple[list[str], list[list[int]]] | None = None
        """Cache of the newest bad words and their tokens, which the prompts of one request
        share."""

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters that the model or the engine does not support.

        Raises:
            RequestError: names the field and the accepted values.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"the parameters must be SamplingParams, got {type(params).__name__}",
                param="sampling_params",
            )
        params.check_ranking()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._max_logprobs:
                raise RequestError(
                    f"{name} must be at most {self._max_logprobs} (max_logprobs of the engine), "
                    f"got {value}",
                    param=name,
                )
        self._named_processors.check(params)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.all_stop_token_ids)
        if params.guided_decoding is not None:
            # Raises if the constraint is invalid.
            make_spec(params.guided_decoding, self._structured_output)
            prompts = self._prompts
            if prompts.tokenizer is None or prompts.end_tokens == (None, frozenset()):
                raise RequestError(
                    "structured output needs a tokenizer with an end-of-sequence token, but this "
                    "engine's has none",
                    param=field_of(params.guided_decoding),
                )
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self._prompts.tokenizer is None:
                raise RequestError(
                    f"{name} needs a tokenizer, but this engine runs without one "
                    "(skip_tokenizer_init)",
                    param=name,
                )

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            return
        wrong = next(t for t in token_ids if not 0 <= t < self._vocab_size)
        raise RequestError(
            f"{name} has token id {wrong}, which is not in the vocabulary of "
            f"{self._vocab_size} tokens (0 to {self._vocab_size - 1})",
            param=name,
        )

    def tokenize_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Tokenise each word in two ways: at the beginning of a text, and after another word.

        Raises:
            RequestError: a word becomes no tokens.
        """
        if not words:
            return []
        if self._bad_words is None or self._bad_words[0] != words:
            self._bad_words = list(words), self._encode_bad_words(words)
        return self._bad_words[1]

    def _encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        assert self._prompts.tokenizer is not None
        # Text -> the bad word it comes from; each text is handled once.
        word_of: dict[str, str] = {}
        for word in words:
            stem = word.lstrip()
            for text in (stem, " " + stem) if stem else (word,):
                word_of.setdefault(text, word)
        encoded = self._prompts.tokenizer(list(word_of), add_special_tokens=False, verbose=False)
        sequences: list[list[int]] = encoded["input_ids"]
        for word, token_ids in zip(word_of.values(), sequences, strict=True):
            if not token_ids or max(token_ids) >= self._vocab_size:
                raise RequestError(
                    f"bad_words: {word!r} has no tokens in the vocabulary of the model. Leave it "
                    f"out",
                    param="bad_words",
                )
        return list({tuple(token_ids): token_ids for token_ids in sequences}.values())


def check_without_tokens(params: SamplingParams) -> None:
    """Refuse parameters that need the prompt's tokens. Called if the prompt is embeddings."""
    if not isinstance(params, SamplingParams):
        return
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(params, name) is not None:
            raise needs_tokens(name)
