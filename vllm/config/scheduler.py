"""Define limits and policy of one scheduling step."""

from dataclasses import dataclass, field
from typing import Literal

from vllm.config.fields import check_at_least, check_longest_prompt, check_one_of
from vllm.errors import ConfigError

SchedulerPolicy = Literal["fcfs", "priority"]


ENCODER_CACHE_SIZE = 16384
"""Embeddings of images that are kept at least: 128 MiB of a model with a hidden size of 4096."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of the scheduler.

    Frozen: the values do not change while the engine runs.
    """

    max_model_len: int = field(metadata={"cli": False})
    """Maximum number of tokens of a request, prompt and output together (flag: see ModelConfig)."""

    max_num_seqs: int = field(metadata={"auto": True})
    """Maximum number of requests in one step. Default: 256 on cpu, 128 on hpu; 32 for a model with
    recurrent states (Mamba or DeltaNet layers)."""

    max_num_batched_tokens: int = field(metadata={"auto": True})
    """Maximum number of tokens in one step, over all requests. All running requests wait until a
    step is finished: if prompts are slow (large model, few cores), a smaller value gives earlier
    first tokens. Default: 2048 on cpu and 8192 on hpu, or max_model_len if chunked prefill is
    off."""

    max_step_ms: int | None = field(default=None, metadata={"auto": True})
    """Time limit of a step, in milliseconds. While requests generate, a step computes only as many
    prompt tokens as fit into this time, so that requests do not wait long for their next tokens.
    The time is predicted from earlier steps. 0: no limit. Default: 300 for a server on cpu, unless
    it pools or chunked prefill is off; otherwise 0. On hpu the buckets decide the length of a
    step."""

    enable_chunked_prefill: bool = True
    """Split a prompt over several steps if it has more tokens than fit into one step
    (--max-num-batched-tokens)."""

    max_num_partial_prefills: int = 1
    """Maximum number of prompts that are partly computed at the same time."""

    max_long_partial_prefills: int = 1
    """Maximum number of prompts longer than --long-prefill-token-threshold that are partly computed
    at the same time."""

    long_prefill_token_threshold: int = 0
    """Maximum number of prompt tokens of one request in one step. 0: no limit if
    max_num_partial_prefills is 1, otherwise 4 % of max_model_len."""

    async_scheduling: bool = True
    """Prepare the next step while the current one is computed, if that saves time. Outputs do not
    change."""

    num_scheduler_steps: int = field(default=1, metadata={"aliases": ("--num-scheduler-seqs",)})
    """Maximum number of decode steps that run without scheduling between them, while the batch does
    not change. More than 1 saves time if steps are short, but tokens arrive in groups, and a new
    request waits until the group is finished. Outputs do not change. No effect with draft tokens or
    pipeline stages."""

    max_draft_tokens: int = field(default=0, metadata={"cli": False})
    """Maximum number of draft tokens that a step verifies for each request; 0: none. A device with
    static shapes prepares batches with this many more tokens."""

    max_loras: int = field(default=0, metadata={"cli": False})
    """Maximum number of different LoRA adapters in one step (flag: see LoRAConfig)."""

    scheduling_policy: SchedulerPolicy = "fcfs"
    """Order in which waiting requests are run. fcfs: by arrival. priority: by the priority of each
    request (lower is first)."""

    def __post_init__(self) -> None:
        check_at_least(
            self,
            1,
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "num_scheduler_steps",
        )
        check_at_least(self, 0, "long_prefill_token_threshold", "max_draft_tokens", "max_loras")
        if self.max_step_ms is not None:
            check_at_least(self, 0, "max_step_ms")
        if self.max_step_ms and not self.enable_chunked_prefill:
            raise ConfigError(
                f"max_step_ms must be 0 with enable_chunked_prefill=False, got "
                f"{self.max_step_ms}: a step can be kept short only if prompts may be divided. "
                f"Leave max_step_ms out, or turn chunked prefill on"
            )
        check_one_of(self, "scheduling_policy", ("fcfs", "priority"))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than "
                f"max_num_seqs ({self.max_num_seqs}): a full decode step would not fit. "
                f"Raise the first or lower the second."
            )
        check_longest_prompt(self)
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                f"max_long_partial_prefills ({self.max_long_partial_prefills}) must not exceed "
                f"max_num_partial_prefills ({self.max_num_partial_prefills}). Lower the first or "
                f"raise the second"
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) must not "
                f"exceed max_model_len ({self.max_model_len}). Lower it"
            )

    @property
    def encoder_budget(self) -> int:
        """Number of image embeddings that a step may compute."""
        # Without chunked prefill, a prompt runs in one step, and so do all of its images.
        return self.max_num_batched_tokens if self.enable_chunked_prefill else self.max_model_len

    @property
    def encoder_cache_size(self) -> int:
        """Number of image embeddings that are stored."""
        return max(ENCODER_CACHE_SIZE, 2 * self.max_num_batched_tokens, self.encoder_budget)

    @property
    def longest_chunk(self) -> int:
        """Number of prompt tokens of one request for which a step always has room, once earlier
        prompts are computed: all other requests may decode.
        """
        return min(self.prefill_chunk_limit, self.max_num_batched_tokens - self.max_num_seqs + 1)

    @property
    def prefill_chunk_limit(self) -> int:
        """Maximum number of prompt tokens of one request in one step."""
        if not self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        if self.long_prefill_token_threshold:
            return self.long_prefill_token_threshold
        if self.max_num_partial_prefills > 1:
            return max(1, int(self.max_model_len * 0.04))
        return self.max_num_batched_tokens
