"""Sample on the CPU with C++ kernels, and with torch for what they do not support."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm.ops.cpu.sampling import RowChanges, RowNumbers, SamplingKernels, load_sampling_kernels
from vllm.sample.block_reductions import num_draws
from vllm.sample.features import Feature, Param
from vllm.sample.logprobs import LogprobTensors
from vllm.sample.metadata import IndexArray, OperatorChoice, SamplingMetadata
from vllm.sample.restrictions.processors import LogitsProcessorError
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState

Tokens = tuple[Tensor, Tensor]
"""`token_ids` and `host_ids` of `SamplerOutput`."""


def make_sampler(
    max_num_seqs: int, vocab_size: int, device: torch.device
) -> tuple[SamplingState, Sampler]:
    """Create the sampling state and its sampler, for a device without static shapes.

    Args:
        max_num_seqs: maximum number of requests.
        vocab_size: V of the logits.
        device: device of the logits.
    """
    kernels = load_sampling_kernels() if device.type == "cpu" else None
    if kernels is None:
        return SamplingState(max_num_seqs, vocab_size, device), Sampler()
    return SamplingState(max_num_seqs, vocab_size, device, draw_keys=True), CPUSampler(kernels)


class CPUSampler(Sampler):
    """A `Sampler` for logits on the host that samples all requests in one call of a C++ kernel.

    The tokens are the same as for a `Sampler`, with one exception: likelihoods, their sums and
    random numbers may differ from torch and numpy in the last bits. So a token may differ if two
    tokens are equal in the draw, or a token is exactly at the limit of top_p or min_p, within about
    1e-6. A token does not depend on the other requests of a batch, the number of threads or the
    instruction set.
    """

    def __init__(self, kernels: SamplingKernels) -> None:
        super().__init__()
        self._kernels = kernels
        names = tuple("k" + param.name.title().replace("_", "") for param in Param)
        if kernels.params != names:
            raise AssertionError(
                f"parameters of the C++ kernels must be {names}, got {kernels.params}"
            )

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample tokens. float32 and bfloat16 logits are read directly, others are processed by
        torch.
        """
        if not self._kernels.supports(logits):
            return super().__call__(logits, for_torch(metadata, logits.shape[-1]))
        if metadata.rules is not None:
            logits = metadata.rules.apply(logits)
        token_ids = torch.empty(logits.shape[0], dtype=torch.int32)
        out = (token_ids, torch.empty_like(token_ids))
        errors: dict[int, str] = {}
        rows = None
        if metadata.processors:
            rows = self._sample_processed(logits, metadata, out, errors)
        self._sample_rows(logits, metadata, out, rows)
        host_ids = out[1]
        if (plan := metadata.logprobs) is None:
            return SamplerOutput(token_ids=token_ids, host_ids=host_ids, errors=errors)
        wanted = None if plan.rows is None else plan.indices
        found = self._kernels.gather_logprobs(logits, token_ids, plan.width, wanted)
        return SamplerOutput(
            token_ids=token_ids,
            host_ids=host_ids,
            logprobs=LogprobTensors(*found),
            logprob_plan=plan,
            errors=errors,
        )

    def gather_logprobs(
        self, logits: Tensor, token_ids: Tensor, num_logprobs: int
    ) -> LogprobTensors:
        """Return log-probabilities. float32 and bfloat16 logits are read directly, others are
        processed by torch.
        """
        if not self._kernels.supports(logits):
            return super().gather_logprobs(logits, token_ids, num_logprobs)
        return LogprobTensors(*self._kernels.gather_logprobs(logits, token_ids, num_logprobs))

    def _sample_rows(
        self, logits: Tensor, metadata: SamplingMetadata, out: Tokens, rows: IndexArray | None
    ) -> None:
        """Sample some requests of a batch, or all."""
        if metadata.features is None:
            self._kernels.sample(logits, out)
            return
        keys = metadata.draw_keys
        numbers = None
        if metadata.exponentials is not None:
            numbers = RowNumbers(exponentials=metadata.exponentials)
        elif keys is not None:
            numbers = RowNumbers(keys.keys, keys.positions)
        self._kernels.sample(
            logits,
            out,
            rows=rows,
            params=metadata.params,
            numbers=numbers,
            changes=_changes(metadata),
        )

    @torch.inference_mode()
    def _sample_processed(
        self, logits: Tensor, metadata: SamplingMetadata, out: Tokens, errors: dict[int, str]
    ) -> IndexArray:
        """Sample the requests with logits processors, from a copy of their logits, and return the
        other requests.
        """
        indices = np.array([index for index, _ in metadata.processors], np.int64)
        rows = torch.from_numpy(indices)
        copy = logits[rows].float()
        for own, (index, processors) in zip(copy, metadata.processors, strict=True):
            try:
                processors.apply(own)
            except LogitsProcessorError as error:
                errors[index] = str(error)
        part = (
            torch.empty(len(rows), dtype=torch.int32),
            torch.empty(len(rows), dtype=torch.int32),
        )
        self._sample_rows(copy, metadata.select(indices, rows), part, None)
        for whole, some in zip(out, part, strict=True):
            whole[rows] = some
        return np.setdiff1d(np.arange(len(logits)), indices)


def _changes(metadata: SamplingMetadata) -> RowChanges | None:
    edits, masks, penalties = metadata.edits, metadata.masks, metadata.penalties
    if edits is None and masks is None and penalties is None:
        return None
    assert metadata.features is not None
    changed = (metadata.features & (Feature.EDITS | Feature.MASK | Feature.PENALTIES)) != 0
    words = None
    if masks is not None:
        mask_of = np.full(len(changed), -1, np.int32)
        mask_of[masks.rows] = np.arange(len(masks.rows))
        words = (mask_of, masks.words)
    return RowChanges(
        changed=changed,
        edits=None if edits is None else (edits.token_ids, edits.values),
        masks=words,
        penalties=None if penalties is None else (penalties.token_ids, penalties.counts),
    )


def for_torch(metadata: SamplingMetadata, vocab_size: int) -> SamplingMetadata:
    """Return the metadata with random numbers instead of their keys, as torch operators need
    them.
    """
    keys, params, features = metadata.draw_keys, metadata.params, metadata.features
    if keys is None or params is None or features is None:
        return metadata
    return replace(
        metadata,
        exponentials=torch.from_numpy(keys.exponentials(num_draws(vocab_size))),
        draw_keys=None,
        **OperatorChoice.of(features, params[Param.TOP_K].numpy())._asdict(),
    )
