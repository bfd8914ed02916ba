"""The state of one request inside the engine core. Independent of text and devices."""

from enum import IntEnum

from vllm.messages import EngineRequest


class RequestStatus(IntEnum):
    """State of a request. A preempted request waits again."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Request:
    """One request in the engine core: its tokens, and how many of them the KV cache holds.

    Attributes:
        spec: the request as the user sent it; never changes.
        token_ids: prompt and the output known so far.
        num_prompt_tokens: how many of them are the prompt.
        status: waiting, running or finished.
        row: index in the per-request arrays while running, else -1.
        block_ids: block table of the request while running, for the first group of layers.
        more_block_ids: block tables of the request for the other groups, equally long.
        block_hashes: content hash of each full block of known tokens, as far as computed.
        num_cached_blocks: leading blocks that are in the prefix cache.
        num_cached_tokens: prompt tokens found cached at first admission; -1 before it.
        num_prompt_logprobs: prompt positions whose log-probabilities were sent.
        num_preemptions: how often it was preempted.
        takes_drafts: whether it may have drafts.
        draft_evidence: how many tokens before the latest drafts agree with the text from which the
            drafts were copied; 0: they were not copied.
        num_undrafted: consecutive decodes without drafts although drafts were searched, or after
            which searching was stopped.
        draft_accuracy: by kind of evidence, the fraction of its drafts that were accepted, 0 to 1;
            recent ones have more weight.
        sort_key: requests with smaller keys are scheduled first.
        state_ends: lengths of prefixes whose recurrent states are still to be kept.
        num_kept_tokens: number of leading tokens covered by the recurrent state that it owns in the
            prefix cache.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "draft_accuracy",
        "draft_evidence",
        "more_block_ids",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_kept_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_undrafted",
        "request_id",
        "row",
        "sort_key",
        "spec",
        "state_ends",
        "status",
        "takes_drafts",
        "token_ids",
    )

    def __init__(self, spec: EngineRequest, sort_key: tuple[float, ...]) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.token_ids = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.status = RequestStatus.WAITING
        self.row = -1
        self.block_ids: list[int] = []
        self.more_block_ids: list[list[int]] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0
        self.takes_drafts = False
        self.draft_accuracy: dict[int, float] = {}
        self.draft_evidence = 0
        self.num_undrafted = 0
        self.sort_key = sort_key
        self.state_ends: list[int] = []
        self.num_kept_tokens = 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt token must be computed, even if it is cached."""
        return self.spec.sampling_params.prompt_logprobs is not None

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {len(self.token_ids)} tokens)"
