"""Provide the methods of `LLM` for pooling models."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from vllm.engine.input.pooling_input import require_scores, require_task
from vllm.engine.llm_engine import LLMEngine
from vllm.engine.unavailable import refuse
from vllm.entrypoints.offline.offline_run import (
    Prompts,
    as_list,
    naming_prompt,
    per_prompt,
    run_requests,
)
from vllm.entrypoints.offline.progress import MakeBar
from vllm.entrypoints.shared.scoring import cosine, pair_up
from vllm.errors import RequestError
from vllm.inputs import PromptType
from vllm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm.pooling_params import PoolingParams

if TYPE_CHECKING:
    from vllm.config import PoolerConfig

Pooled = PoolingRequestOutput[PoolingOutput]
PoolingParameters = PoolingParams | Sequence[PoolingParams]


class PoolingMethods:
    """Computes embeddings, classes, scores and rewards. Mixed into `LLM`, which has the engine."""

    llm_engine: LLMEngine
    request_counter: Iterator[int]

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
        return [
            EmbeddingRequestOutput(
                **_shared(each), outputs=EmbeddingOutput(each.outputs.data.tolist())
            )
            for each in found
        ]

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
        return [
            ClassificationRequestOutput(
                **_shared(each), outputs=ClassificationOutput(each.outputs.data.tolist())
            )
            for each in found
        ]

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
        return [
            ScoringRequestOutput(
                **_shared(each), outputs=ScoringOutput(float(each.outputs.data[0]))
            )
            for each in found
        ]

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
        each = _params_per_prompt(params, truncate, len(prompts))
        requests = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts)):
                requests.append(
                    self.llm_engine.input_processor.process_pooling(
                        str(next(self.request_counter)), prompt, each[index]
                    )
                )
        outputs = cast(list[Pooled], run_requests(self.llm_engine, requests, use_tqdm))
        for index, output in enumerate(outputs):
            if output.error is not None:
                with naming_prompt(index, len(prompts)):
                    raise RequestError(output.error)
        return outputs


def _shared(output: Pooled) -> dict[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
    }


def _params_per_prompt(
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
