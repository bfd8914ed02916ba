"""Greedy generation and log-probabilities by `transformers`, one prompt at a time."""

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.reference_model import load_reference
from vllm.transformers_utils.transformers_version import is_version_4

NUM_LIKELIEST = 5

SHORT_TEXTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "block_size": 16,
    "num_gpu_blocks_override": 60,
}
"""Arguments of an engine for a few prompts that are compared with `transformers`."""


@dataclass(frozen=True)
class Reference:
    """What `transformers` makes of one prompt.

    Attributes:
        token_ids: greedy output.
        prompt: token ids, or embeddings.
        logprobs: [prompt + output - 1, vocab] of every token after the first, float32.
        margins: per output token, how far the likeliest logit is above the second.
    """

    prompt: list[int] | torch.Tensor
    token_ids: list[int]
    logprobs: torch.Tensor
    margins: list[float]


def random_prompts(count: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed length, the shortest and the longest among them; some begin alike."""
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, longest] + [rng.randint(3, longest) for _ in range(count - 6)]
    shared = [rng.randrange(16, vocab_size) for _ in range(longest)]
    prompts = []
    for index, length in enumerate(lengths):
        own = [rng.randrange(16, vocab_size) for _ in range(length)]
        common = rng.randint(0, length - 1) if index % 3 == 0 else 0
        prompts.append(shared[:common] + own[common:])
    return prompts


@torch.inference_mode()
def generate(
    folder: Path,
    prompts: Sequence[list[int] | torch.Tensor],
    max_tokens: int,
    use_cache: bool = True,
) -> list[Reference]:
    """Return greedy continuations in float32, of token ids or embeddings [T, size]; end tokens do
    not end them.

    Args:
        folder: of the model.
        prompts: one result each.
        max_tokens: of each continuation.
        use_cache: of transformers; False where it is wrong.
    """
    model = load_reference(folder)
    if is_version_4():  # some of its caches hold one kind of layer only
        use_cache = False
    return [_one(model, prompt, max_tokens, use_cache) for prompt in prompts]


def _one(
    model: torch.nn.Module, prompt: list[int] | torch.Tensor, max_tokens: int, use_cache: bool
) -> Reference:
    cache = None
    if isinstance(prompt, torch.Tensor):
        inputs = {"inputs_embeds": prompt[None]}
    else:
        inputs = {"input_ids": torch.tensor([prompt])}
    token_ids: list[int] = []
    margins: list[float] = []
    rows: list[torch.Tensor] = []
    name = cache_name(model)
    for _ in range(max_tokens):
        output = model(**inputs, **{name: cache}, use_cache=use_cache)
        logits = output.logits[0].float()
        if rows and not use_cache:
            logits = logits[-1:]
        rows.append(logits.log_softmax(-1))
        best = logits[-1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        token_ids.append(int(best.indices[0]))
        if use_cache:
            cache, inputs = output[name], {"input_ids": torch.tensor([token_ids[-1:]])}
        else:
            inputs = _with_token(inputs, model, token_ids[-1])
    return Reference(prompt, token_ids, torch.cat(rows), margins)


def cache_name(model: torch.nn.Module) -> str:
    """What transformers calls the cache that a model takes and returns: `cache` since 5.24."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _with_token(inputs: dict[str, Any], model: Any, token_id: int) -> dict[str, Any]:
    token = torch.tensor([[token_id]])
    if "input_ids" in inputs:
        return {"input_ids": torch.cat((inputs["input_ids"], token), dim=1)}
    embedded = model.get_input_embeddings()(token)
    return {"inputs_embeds": torch.cat((inputs["inputs_embeds"], embedded), dim=1)}


def assert_same_tokens(got: list[int], want: Reference, max_margin: float = 1e-4) -> None:
    """Equal, but for what follows a token that `transformers` itself was undecided about."""
    for position, (ours, theirs) in enumerate(zip(got, want.token_ids, strict=True)):
        if ours != theirs:
            assert want.margins[position] < max_margin, (
                f"prompt of {len(want.prompt)} tokens, output {position}: {ours} instead of "
                f"{theirs}, which was ahead by {want.margins[position]}"
            )
            return
