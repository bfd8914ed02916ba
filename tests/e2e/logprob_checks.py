"""Log-probabilities of prompts and outputs, ours and those of `transformers`."""

import torch

from tests.e2e.reference import Reference


def logprobs_of(outputs: list) -> list[torch.Tensor]:
    """Of each request: of its prompt after the first token, and of its output."""
    found = []
    for output in outputs:
        tokens = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        found.append(
            torch.tensor([e[token].logprob for token, e in zip(tokens, entries, strict=True)])
        )
    return found


def wanted_logprobs(reference: Reference) -> torch.Tensor:
    tokens = torch.tensor([*reference.prompt[1:], *reference.token_ids])
    return reference.logprobs.gather(1, tokens[:, None])[:, 0]
