"""Run models offline: one call takes all prompts and returns all outputs."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.engine.input.pooling_input import refuse_generation, require_scores, require_task
from vllm.engine.llm_engine import LLMEngine
from vllm.engine.unavailable import refuse
from vllm.entrypoints.chat_utils import ChatOptions, ContentFormat, Message, render_with_media
from vllm.entrypoints.offline.legacy_arguments import with_guided_options, with_token_ids
from vllm.entrypoints.offline.offline_run import (
    Prompts,
    as_list,
    naming_prompt,
    per_prompt,
    run_requests,
)
from vllm.entrypoints.offline.progress import MakeBar
from vllm.entrypoints.shared.beam_search import check_beam_width, search_beams
from vllm.entrypoints.shared.media import (
    fetch_media_sync,
    make_fetcher,
    media_prompt,
    media_rules,
    require_chat,
)
from vllm.entrypoints.shared.replayed_traffic import with_recorded_traffic
from vllm.entrypoints.shared.scoring import cosine, pair_up
from vllm.errors import RequestError
from vllm.inputs import PromptType, TextPrompt, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.messages import EngineRequest
from vllm.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.utils import Counter
from vllm.utils.methods import passed_on

if TYPE_CHECKING:
    from torch import nn

    from vllm.config import PoolerConfig
    from vllm.multimodal.fetching.fetch import MediaFetcher

_Result = TypeVar("_Result")

Params = SamplingParams | Sequence[SamplingParams]
Pooled = PoolingRequestOutput[PoolingOutput]
PoolingParameters = PoolingParams | Sequence[PoolingParams]


def _engine_of(llm: "LLM") -> LLMEngine:
    return llm.llm_engine


class LLM:
    """Runs a model for generation or pooling, without a server. Not thread-safe.

    The model is released when the object is garbage-collected, at the end of the program, or by
    `llm_engine.shutdown()`.

    Args:
        model: folder or Hugging Face name; None: the small model in the package.
        engine_args: any field of `EngineArgs`, such as `tokenizer`, `tensor_parallel_size`,
            `dtype`, `max_model_len`, `seed` or `enforce_eager`. `disable_log_stats` is True by
            default; `get_metrics` needs False.

    Attributes:
        llm_engine: the engine that runs the requests.
        request_counter: counter for the ids of requests.

    Raises:
        ConfigError: the engine cannot start with these arguments.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs

        engine_args.setdefault("disable_log_stats", True)
        args = with_recorded_traffic(EngineArgs(model=model, **engine_args).without_streams())
        self._start(LLMEngine.from_engine_args(args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> "LLM":
        """Create an `LLM` for an existing engine, which must not be used elsewhere meanwhile."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self.request_counter = Counter()
        self._lock = RLock()
        """Held while requests run: several threads may use the object, one after the other."""

    # ---- generation -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Params | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        guided_options_request: Any = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt.

        All prompts are checked before the first one runs. If Ctrl-C or an error stops the run, the
        remaining requests are dropped and the object can be used again. An adapter that does not
        fit the model is such an error. A request that fails while it runs has finish reason "error"
        and the message as its stop reason; other requests are not affected.

        Args:
            prompts: one or several prompts of any type; a list of integers is one prompt.
            sampling_params: one object for all prompts, or one per prompt; None: the model's
                recommendation.
            prompt_token_ids: deprecated.
            use_tqdm: whether to show a progress bar; or a function that creates one.
            lora_request: the LoRA adapter to use; one for all prompts or a list with one or None
                per prompt.
            prompt_adapter_request: must be None.
            guided_options_request: deprecated; structured output, as a dict with one of
                guided_json, guided_regex, guided_choice, guided_grammar and guided_json_object.
            priority: one integer per prompt; smaller values run first if the engine's scheduling
                policy is "priority".

        Returns:
            One output per prompt, in the same order.

        Raises:
            RequestError: (a ValueError) a prompt, its adapter or its parameters are not valid;
                names the prompt.
            CapacityError: (a ValueError) a prompt can never fit into the KV cache.
        """
        refuse(prompt_adapter_request=prompt_adapter_request)
        if prompt_token_ids is not None:
            prompts = with_token_ids(prompts, prompt_token_ids)
        if prompts is None:
            raise RequestError("the argument prompts is missing", param="prompts")
        if guided_options_request is not None:
            sampling_params = with_guided_options(
                sampling_params or self.get_default_sampling_params(), guided_options_request
            )
        return self._run(as_list(prompts), sampling_params, priority, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        Args:
            messages: a conversation, or a list of them.
            sampling_params, use_tqdm, lora_request: as in `generate`.
            chat_template ... chat_template_kwargs: see `ChatOptions`.
            mm_processor_kwargs: settings that override settings of the model's processor.

        Returns:
            One output per conversation, in the same order.

        Raises:
            RequestError: (a ValueError) a conversation is not valid, or there is no chat template.
        """
        refuse_generation(self.llm_engine.model_config.pooler)
        prompts = self.preprocess_chat(
            messages,
            None,
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            mm_processor_kwargs,
        )
        return self._run(prompts, sampling_params, None, use_tqdm, lora_request)

    def preprocess_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[TokensPrompt]:
        """Return the prompts that `chat` would run, one per conversation. The arguments are the
        same as for `chat`.

        Every adapter uses the tokenizer and the chat template of the model.

        Raises:
            RequestError: (a ValueError) a conversation is not valid, or there is no chat template.
        """
        options = ChatOptions(
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs or {},
        )
        prompts = []
        conversations = _as_conversations(messages)
        for index, conversation in enumerate(conversations):
            with naming_prompt(index, len(conversations)), self._lock:
                prompts.append(self._chat_prompt(conversation, options, mm_processor_kwargs))
        return prompts

    def beam_search(
        self,
        prompts: Sequence[TokensPrompt | TextPrompt | str],
        params: BeamSearchParams,
        lora_request: Any = None,
    ) -> list[BeamSearchOutput]:
        """Find the most likely continuations of every prompt, best first.

        The engine's `max_logprobs` must be at least twice the beam width.

        Args:
            prompts: prompts of text or token ids.
            params: width, length and scoring.
            lora_request: adapter, as in `generate`.

        Raises:
            RequestError: (a ValueError) a prompt, an adapter or the parameters are not valid.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(
                f"params must be BeamSearchParams, got {type(params).__name__}", param="params"
            )
        adapters = _adapter_per_prompt(lora_request, len(prompts))
        check_beam_width(
            params.beam_width,
            self.llm_engine.model_config.max_logprobs,
            name="beam_width",
            limit="max_logprobs",
        )
        processor = self.llm_engine.input_processor
        tokenized = [processor.tokenize(cast(PromptType, each)).as_prompt() for each in prompts]
        eos, others = processor.prompts.end_tokens
        end_tokens = others if eos is None else others | {eos}

        def run(
            beams: list[TokensPrompt], step: SamplingParams, owners: list[int]
        ) -> list[RequestOutput]:
            chosen = [adapters[owner] for owner in owners]
            return self._run(cast(list[PromptType], beams), step, None, False, chosen)

        return search_beams(
            tokenized,
            params,
            run,
            end_tokens=frozenset() if params.ignore_eos else end_tokens,
            max_model_len=self.llm_engine.scheduler_config.max_model_len,
            tokenizer=self.llm_engine.input_processor.tokenizer,
        )

    # ---- pooling --------------------------------------------------------------------------

    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParameters | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
    ) -> list[Pooled]:
        """Compute the pooled result of every prompt, for any pooling task.

        Args:
            prompts: one or several prompts of any type.
            pooling_params: one object for all prompts, or one per prompt.
            prompt_token_ids: prompts as token ids, instead of `prompts`.
            truncate_prompt_tokens: maximum number of tokens, to which longer prompts are cut; -1:
                max_model_len.
            use_tqdm: whether to show a progress bar; or a function that creates one.
            lora_request, prompt_adapter_request: must be None.

        Returns:
            One output per prompt, in the same order. `outputs.data` is a float32 tensor: [values],
            or [tokens, values] with one result per token.

        Raises:
            RequestError: (a ValueError) a prompt or its parameters are not valid, the model does
                not pool, or a result is not finite; names the prompt.
        """
        refuse(lora_request=lora_request, prompt_adapter_request=prompt_adapter_request)
        prompts = prompt_token_ids if prompts is None else prompts
        if prompts is None:
            raise RequestError("the argument prompts is missing", param="prompts")
        require_task(self._pooler)
        import torch

        outputs = self._pool(as_list(prompts), pooling_params, truncate_prompt_tokens, use_tqdm)
        for output in outputs:
            output.outputs = PoolingOutput(torch.from_numpy(output.outputs.data.copy()))
        return outputs

    def embed(
        self,
        prompts: Prompts,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParameters | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding vector for every prompt. The arguments are the same as for `encode`.

        Raises:
            RequestError: as for `encode`, and if the model does not run for embeddings.
        """
        refuse(lora_request=lora_request, prompt_adapter_request=prompt_adapter_request)
        require_task(self._pooler, "embed")
        found = self._pool(as_list(prompts), pooling_params, truncate_prompt_tokens, use_tqdm)
        return _converted(
            found, EmbeddingRequestOutput, lambda data: EmbeddingOutput(data.tolist())
        )

    def reward(
        self,
        prompts: Prompts,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParameters | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
    ) -> list[Pooled]:
        """Run a reward model on every prompt. The arguments and outputs are the same as for
        `encode`.

        Raises:
            RequestError: as for `encode`, and if the model does not run for rewards.
        """
        require_task(self._pooler, "reward")
        return self.encode(
            prompts,
            pooling_params,
            None,
            truncate_prompt_tokens,
            use_tqdm,
            lora_request,
            prompt_adapter_request,
        )

    def classify(
        self,
        prompts: Prompts,
        /,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
    ) -> list[ClassificationRequestOutput]:
        """Return a probability per label for every prompt. The arguments are the same as for
        `encode`.

        Raises:
            RequestError: as for `encode`, and if the model is not a classifier.
        """
        refuse(lora_request=lora_request, prompt_adapter_request=prompt_adapter_request)
        require_task(self._pooler, "classify", "score")
        found = self._pool(as_list(prompts), None, None, use_tqdm)
        return _converted(
            found, ClassificationRequestOutput, lambda data: ClassificationOutput(data.tolist())
        )

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one text with each of several, or pair by pair.

        An embedding model scores by the cosine of the two vectors; a cross-encoder reads both texts
        at once.

        Args:
            text_1: one text, or as many texts as `text_2`.
            text_2: one text or several.
            truncate_prompt_tokens, use_tqdm, lora_request, prompt_adapter_request: as in `encode`.

        Returns:
            One score per pair.

        Raises:
            RequestError: as for `encode`, and if the model cannot score or the numbers of texts do
                not match.
        """
        refuse(lora_request=lora_request, prompt_adapter_request=prompt_adapter_request)
        pooler = require_scores(self._pooler)
        first, second = pair_up(text_1, text_2)
        if pooler.task == "embed":
            return self._score_embeddings(first, second, truncate_prompt_tokens, use_tqdm)
        tokenize_pair = self.llm_engine.input_processor.pooling.tokenize_pair
        prompts: list[PromptType] = []
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            with naming_prompt(index, len(second)):
                prompts.append(tokenize_pair(a, b, truncate_prompt_tokens))
        found = self._pool(prompts, None, None, use_tqdm)
        return _converted(found, ScoringRequestOutput, lambda data: ScoringOutput(float(data[0])))

    # ---- the engine -----------------------------------------------------------------------

    @classmethod
    @contextmanager
    def deprecate_legacy_api(cls) -> Iterator[None]:
        """Show all deprecation warnings inside the context, even hidden ones."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", DeprecationWarning)
            yield

    get_tokenizer = passed_on(LLMEngine.get_tokenizer, _engine_of)
    set_tokenizer = passed_on(LLMEngine.set_tokenizer, _engine_of)
    collective_rpc = passed_on(LLMEngine.collective_rpc, _engine_of)
    sleep = passed_on(LLMEngine.sleep, _engine_of)
    wake_up = passed_on(LLMEngine.wake_up, _engine_of)
    start_profile = passed_on(LLMEngine.start_profile, _engine_of)
    stop_profile = passed_on(LLMEngine.stop_profile, _engine_of)
    get_metrics = passed_on(LLMEngine.get_metrics, _engine_of)
    reset_prefix_cache = passed_on(LLMEngine.reset_prefix_cache, _engine_of)
    reset_mm_cache = passed_on(LLMEngine.reset_mm_cache, _engine_of)

    def apply_model(self, func: "Callable[[nn.Module], _Result]") -> list[_Result]:
        """Call a function with the model of every worker.

        Linear layers may store their weights in the layout of the kernels instead of a parameter.
        On the CPU this applies to bfloat16 and quantized models.

        Returns:
            One result per worker.
        """
        return self.collective_rpc(lambda worker: func(worker.get_model()))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's generation_config.json recommends, as a
        new object.
        """
        defaults = dict(self.llm_engine.generation_defaults)
        defaults.pop("eos_token_ids", None)
        return SamplingParams.from_optional(**defaults)

    # ---- internals ------------------------------------------------------------------------

    @property
    def _pooler(self) -> "PoolerConfig | None":
        return self.llm_engine.model_config.pooler

    def _score_embeddings(
        self, first: list[str], second: list[str], truncate: int | None, use_tqdm: bool | MakeBar
    ) -> list[ScoringRequestOutput]:
        texts = list(dict.fromkeys([*first, *second]))  # each distinct text once
        found = self._pool(cast(list[PromptType], texts), None, truncate, use_tqdm)
        by_text = dict(zip(texts, found, strict=True))
        scores = []
        for a, b in zip(first, second, strict=True):
            left, right = by_text[a], by_text[b]
            score = cosine(left.outputs.data, right.outputs.data)
            scores.append(
                ScoringRequestOutput(
                    request_id=f"{left.request_id}_{right.request_id}",
                    prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids,
                    outputs=ScoringOutput(score),
                )
            )
        return scores

    def _pool(
        self,
        prompts: Sequence[PromptType],
        params: PoolingParameters | None,
        truncate: int | None,
        use_tqdm: bool | MakeBar,
    ) -> list[Pooled]:
        """Run prompts and return their results as numpy arrays. Raises an error if a prompt has no
        result.
        """
        each = _pooling_params_per_prompt(params, truncate, len(prompts))
        requests = []
        with self._lock:
            for index, prompt in enumerate(prompts):
                with naming_prompt(index, len(prompts)):
                    requests.append(
                        self.llm_engine.input_processor.pooling.process(
                            str(next(self.request_counter)), prompt, each[index]
                        )
                    )
            outputs = cast(list[Pooled], run_requests(self.llm_engine, requests, use_tqdm))
        for index, output in enumerate(outputs):
            if output.error is not None:
                with naming_prompt(index, len(prompts)):
                    raise RequestError(output.error)
        return outputs

    def _chat_prompt(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        processor_kwargs: Mapping[str, Any] | None,
    ) -> TokensPrompt:
        processor = self.llm_engine.input_processor
        require_chat(processor)
        rules = media_rules(processor, is_local=True)
        chat = render_with_media(self.get_tokenizer(), messages, options, rules)
        media = fetch_media_sync(self._media_fetcher, chat.media) if chat.media else []
        prompt = media_prompt(chat, media, rules, processor_kwargs)
        tokenized = processor.tokenize(prompt)
        made: TokensPrompt = {"prompt_token_ids": tokenized.token_ids, "prompt": chat.text}
        if tokenized.media:
            made["media"] = tokenized.media
        return made

    @cached_property
    def _media_fetcher(self) -> "MediaFetcher":
        return make_fetcher(self.llm_engine.vllm_config.multimodal)

    def _run(
        self,
        prompts: Sequence[PromptType],
        sampling_params: Params | None,
        priority: Sequence[int] | None,
        use_tqdm: bool | MakeBar,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        params = self._params_per_prompt(sampling_params, len(prompts))
        priorities = per_prompt("priority", priority, len(prompts)) or [0] * len(prompts)
        adapters = _adapter_per_prompt(lora_request, len(prompts))
        processor = self.llm_engine.input_processor
        requests: list[tuple[str | None, EngineRequest]] = []
        with self._lock:
            for index, prompt in enumerate(prompts):
                with naming_prompt(index, len(prompts)):
                    text, request = processor.process(
                        str(next(self.request_counter)),
                        prompt,
                        params[index],
                        priority=priorities[index],
                        lora_request=adapters[index],
                    )
                    requests.append((text, processor.attach_grammar(request)))
            return cast(list[RequestOutput], run_requests(self.llm_engine, requests, use_tqdm))

    def _params_per_prompt(self, params: Params | None, count: int) -> list[SamplingParams]:
        """Copy the parameters for each prompt, and request only the final output. The caller's
        objects are not changed.
        """
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, Sequence):
            return [_final_only(params)] * count
        return [_final_only(each) for each in per_prompt("sampling_params", params, count) or []]


def _adapter_per_prompt(
    asked: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> Sequence[LoRARequest | None]:
    if isinstance(asked, Sequence):
        return per_prompt("lora_request", asked, count) or []
    return [asked] * count


def _final_only(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params must be SamplingParams, got {type(params).__name__}",
            param="sampling_params",
        )
    own = params.clone()
    own.output_kind = RequestOutputKind.FINAL_ONLY
    return own


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    if isinstance(messages, Sequence) and messages and not isinstance(messages[0], (Mapping, str)):
        return list(cast(Sequence[Sequence[Message]], messages))
    return [cast(Sequence[Message], messages)]


def _converted(
    found: Sequence[Pooled], kind: Callable[..., _Result], make: Callable[[Any], Any]
) -> list[_Result]:
    """Return results as outputs of another kind; `make` converts the values of one."""
    return [
        kind(
            request_id=each.request_id,
            prompt_token_ids=each.prompt_token_ids,
            num_cached_tokens=each.num_cached_tokens,
            outputs=make(each.outputs.data),
        )
        for each in found
    ]


def _pooling_params_per_prompt(
    params: PoolingParameters | None, truncate: int | None, count: int
) -> list[PoolingParams]:
    if params is None:
        params = PoolingParams()
    if isinstance(params, PoolingParams):
        found = [params] * count
    else:
        found = per_prompt("pooling_params", params, count) or []
    if truncate is None:
        return found
    return [
        PoolingParams(dimensions=each.dimensions, truncate_prompt_tokens=truncate) for each in found
    ]
