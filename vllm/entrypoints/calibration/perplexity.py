"""Compute the perplexity of token samples, from the log-probabilities that an engine gives for
prompts.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.inputs import TokensPrompt

if TYPE_CHECKING:
    from vllm import LLM


def perplexity(llm: "LLM", samples: Sequence[Sequence[int]], *, use_tqdm: bool = False) -> float:
    """Return the perplexity: exp of the mean of -log p over all tokens except the first of each
    sample.

    Args:
        llm: engine that accepts each sample as a prompt, plus one output token.
        samples: samples of at least two tokens each.
        use_tqdm: show progress.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=list(sample)) for sample in samples]
    total, count = 0.0, 0
    for output in llm.generate(prompts, params, use_tqdm=use_tqdm):
        assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        for token, entry in pairs:
            assert entry is not None
            total -= entry[token].logprob
            count += 1
    return math.exp(total / count)
