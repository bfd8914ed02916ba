"""Compare outputs of an engine with one forward pass of `transformers` over prompt and output.

The reference generates nothing: a token is right if the reference, given all tokens before it,
ranks it first.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tests.reference_model import load_reference
from vllm import SamplingParams
from vllm.outputs import Logprob, RequestOutput

Prompt: TypeAlias = "list[int] | Tensor"
"""Token ids, or embeddings [T, size]."""
Reference: TypeAlias = Callable[[Prompt, list[int]], Tensor]
"""Return logits [prompt + output, vocab] of a prompt and the output of an engine."""

LIMIT = 1e-4
"""Difference of log-probabilities in float32, and between two tokens that are equally likely."""

SHORT_TEXTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "block_size": 16,
    "num_gpu_blocks_override": 60,
}
"""Arguments of an engine for a few prompts that are compared with `transformers`."""


def random_prompts(count: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of mixed length, including the shortest and the longest; some share a
    beginning.
    """
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, longest] + [rng.randint(3, longest) for _ in range(count - 6)]
    shared = [rng.randrange(16, vocab_size) for _ in range(longest)]
    prompts = []
    for index, length in enumerate(lengths):
        own = [rng.randrange(16, vocab_size) for _ in range(length)]
        common = rng.randint(0, length - 1) if index % 3 == 0 else 0
        prompts.append(shared[:common] + own[common:])
    return prompts


class TransformersReference:
    """The model of a folder, computed by `transformers`."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = load_reference(folder, dtype)
        self._known: dict[tuple[int, ...], Tensor] = {}

    @property
    def table(self) -> Tensor:
        """Return the embeddings of tokens, [vocab, size]."""
        table: Tensor = self._model.get_input_embeddings().weight.detach()
        return table

    @torch.inference_mode()
    def __call__(self, prompt: Prompt, output: list[int]) -> Tensor:
        """Return the logits [prompt + output, vocab], float32.

        Logits of token ids are stored, because engines with other settings give the same output.
        """
        key = () if isinstance(prompt, Tensor) else (*prompt, *output)
        logits = self._known.get(key)
        if logits is None:
            logits = self._compute(prompt, output)
            if key:
                self._known[key] = logits
        return logits

    def _compute(self, prompt: Prompt, output: list[int]) -> Tensor:
        if isinstance(prompt, Tensor):
            embedded = self._model.get_input_embeddings()(torch.tensor([output]))
            # Falcon-H1 multiplies embeddings after the lookup.
            if self._model.config.model_type == "falcon_h1":
                embedded = embedded * self._model.config.embedding_multiplier
            inputs = {"inputs_embeds": torch.cat((prompt[None].to(embedded.dtype), embedded), 1)}
        else:
            inputs = {"input_ids": torch.tensor([[*prompt, *output]])}
        logits: Tensor = self._model(**inputs, use_cache=False).logits[0].float()
        return logits


@torch.inference_mode()
def assert_all_greedy(
    outputs: Iterable[RequestOutput],
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    reference: Reference,
    limit: float = LIMIT,
) -> None:
    """Compare greedy outputs with a reference, and log-probabilities if they were requested.

    Args:
        outputs: one for each prompt, with one completion each that did not stop at an end token.
        prompts: prompts that the engine got.
        params: sampling parameters of all prompts, or of each prompt.
        reference: computes the logits.
        limit: largest difference of two log-probabilities.
    """
    each_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for output, prompt, asked in zip(outputs, prompts, each_params, strict=True):
        (completion,) = output.outputs
        token_ids = list(completion.token_ids)
        assert len(token_ids) == asked.max_tokens
        logprobs = reference(prompt, token_ids).log_softmax(-1)
        of_output = logprobs[len(prompt) - 1 : -1]
        chosen = of_output.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        missed = of_output.max(-1).values - chosen
        assert missed.max() < limit, (
            f"prompt of {len(prompt)} tokens: outputs are less likely than another token, "
            f"by {missed.tolist()}"
        )
        if asked.logprobs is not None:
            _assert_same_logprobs(completion.logprobs, token_ids, of_output, asked.logprobs, limit)
        if asked.prompt_logprobs is not None:
            assert isinstance(prompt, list)
            first, *others = output.prompt_logprobs
            of_prompt = logprobs[: len(prompt) - 1]
            assert first is None
            _assert_same_logprobs(others, prompt[1:], of_prompt, asked.prompt_logprobs, limit)


def _assert_same_logprobs(
    entries: Sequence[dict[int, Logprob]],
    token_ids: list[int],
    wanted: Tensor,
    num_likeliest: int,
    limit: float,
) -> None:
    """Compare every log-probability of `entries`, and the tokens that the entries have.

    Args:
        entries: for each position, log-probabilities by token; the token of the output comes first.
        token_ids: token of the output at each position.
        wanted: [positions, vocab] log-probabilities of the reference.
        num_likeliest: entries of each position; the token of the output may be one more.
        limit: largest difference of two log-probabilities.
    """
    assert [next(iter(entry)) for entry in entries] == token_ids
    if not entries:
        return
    assert {len(entry) - num_likeliest for entry in entries} <= {0, 1}
    pairs = [(i, t, e.logprob) for i, entry in enumerate(entries) for t, e in entry.items()]
    positions, tokens, values = (list(column) for column in zip(*pairs, strict=True))
    torch.testing.assert_close(torch.tensor(values), wanted[positions, tokens], atol=limit, rtol=0)
    if num_likeliest:
        least = [sorted(e.logprob for e in entry.values())[-num_likeliest] for entry in entries]
        of_reference = wanted.topk(num_likeliest).values[:, -1]
        torch.testing.assert_close(torch.tensor(least), of_reference, atol=limit, rtol=0)
    own = wanted.gather(1, torch.tensor(token_ids)[:, None])
    ranks = torch.tensor([entry[t].rank for entry, t in zip(entries, token_ids, strict=True)])
    # Other tokens may have the same probability, except for rounding.
    first, last = (1 + (wanted > own + by).sum(-1) for by in (limit, -limit))
    assert (first <= ranks).all() and (ranks <= last).all()
