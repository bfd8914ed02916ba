"""The messages between layers and processes. Frozen data without torch; their methods only read.

    EngineRequest      InputProcessor -> EngineCore      one validated, tokenised request
    SchedulerOutput    Scheduler -> ModelRunner          which requests run, tokens and blocks
    ModelRunnerOutput  ModelRunner -> Scheduler          the sampled tokens
    EngineOutput       EngineCore -> OutputProcessor     the new output of each request
    SchedulerStats     EngineCore -> metrics             counts of requests, and counters
    CacheEvent         KVCacheManager -> subscribers     a change of the prefix cache

A running request has a `row`: its index in every per-request array of the scheduler and of the
runner, from admission until it finishes or is preempted. Per-step data are arrays by row, so a
steady decode step takes a few numpy calls instead of a Python loop.
"""

from collections.abc import Container, Mapping
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

NULL_BLOCK_ID = 0
"""The block that padding reads and writes; never given to a request."""

MAX_END_TOKENS = 8
"""A request that more tokens than this end runs one decode per step."""

NO_TOKEN = -1
"""Stands for a token where there is none."""

DRAFT_OF_WORKER = -1
"""Stands for a draft that the worker makes, with a draft model."""

END_OF_REQUEST = 2**31 - 1
"""Index after the last token of a request, whatever its length."""

SLEEP_TAGS = ("weights", "kv_cache")
"""The parts of an engine that can sleep, in the order in which they wake up."""


class FinishReason(IntEnum):
    """The reason why a request ended; `str()` returns the word of the API."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that an output must follow, compiled for one vocabulary."""

    backend: str
    """The library that compiled `content`: "xgrammar" or "llguidance"."""
    content: bytes
    key: bytes
    """Hash of the other fields: equal grammars have equal keys."""
    vocabulary_key: bytes
    """Key of the vocabulary that it was compiled for."""
    left_out: tuple[str, ...] = ()
    """Parts of its JSON schema that it does not enforce."""


class TokenEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings that replace the embeddings of some prompt tokens."""

    start: int
    """Position of the first one in the prompt."""
    shape: tuple[int, int]
    """[n, size of the model's embeddings]; n tokens in a row."""
    dtype: str
    """float16, bfloat16, float32 or float64; the runner rounds to the model's."""
    data: bytes
    """Row-major, little-endian."""

    @property
    def end(self) -> int:
        """Position after the last replaced token."""
        return self.start + self.shape[0]


class TokenPositions(msgspec.Struct, frozen=True, kw_only=True):
    """Positions for rotary embedding that a request gives, instead of the indices of its tokens."""

    data: bytes
    """[P, n] int32 of the n tokens of the prompt, row-major, little-endian. P is what the model
    takes."""
    offset: int
    """Position minus index of every token after the prompt."""


class MediaTensor(msgspec.Struct, frozen=True, kw_only=True):
    """An array of an image or sound that the encoder reads."""

    name: str
    dtype: str
    """Name of the dtype in numpy, such as |u1."""
    shape: tuple[int, ...]
    data: bytes = b""
    """Row-major, little-endian; empty where `path` has it."""
    path: str | None = None
    """File of this machine with the data, open in another process until the request has ended."""
    offset: int = 0
    """Bytes before the data in this file."""
    file_name: str = ""
    """Name of the memory file at `path`. When it is closed, another file may have the path."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image, sound or video of a request.

    Either its embeddings replace the embeddings of some tokens, or cross-attention layers read its
    hidden states.
    """

    modality: str
    key: str
    """Identifies the content of the item and all settings that decide its embeddings."""
    where: str = ""
    """Position of the item in the request, such as `messages[2].content[1]`, for errors."""
    runs: tuple[tuple[int, int], ...] = ()
    """(index, n): n tokens from this index of the prompt take the next n embeddings of the image.
    In order of the indices. Empty where cross-attention layers read it."""
    num_states: int = 0
    """Hidden states that cross-attention layers read; 0: none do."""
    seen_by: tuple[int, int] = (0, END_OF_REQUEST)
    """Indices of the first token that sees the hidden states, and after the last one. Used only
    with `num_states`."""
    num_parts: int = 1
    """Number of parts that the encoder can run separately, one after the other."""
    tensors: tuple[MediaTensor, ...]

    @property
    def start(self) -> int:
        """Index of the first token that depends on the item directly."""
        return self.seen_by[0] if self.num_states else self.runs[0][0]

    @property
    def end(self) -> int:
        """Index after the last token that depends on the item directly."""
        return self.seen_by[1] if self.num_states else sum(self.runs[-1])

    @property
    def num_embeddings(self) -> int:
        """Number of embeddings, or hidden states, that the encoder computes for the item."""
        return self.num_states or sum(count for _, count in self.runs)


class CacheKey(msgspec.Struct, frozen=True, array_like=True):
    """A key that, in addition to token ids, identifies the content of KV blocks."""

    start: int
    """First position of the prompt whose keys and values depend on it; 0 for an adapter."""
    key: str
    """Identifies the content, such as the hash of an image."""


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter of a request."""

    name: str
    path: str
    """Folder on this machine."""
    key: str
    """Hash of its content."""
    number: int = 1
    """`lora_int_id` of the request, 1 or larger."""


def number_of(adapter: AdapterRef | None) -> int | None:
    """Return the `lora_int_id` of the adapter of a request; None if it has none."""
    return None if adapter is None else adapter.number


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of a model for its output tokens, for example of a transcription model.

    Logits of forbidden tokens are -inf before any sampling parameter is applied, and in
    log-probabilities.
    """

    written: tuple[int, ...] = ()
    """Tokens at the end of the prompt that count as the beginning of the output."""
    never: tuple[int, ...] = ()
    """Tokens that no output may have."""
    not_first: tuple[int, ...] = ()
    """Tokens that are not the first of an output."""
    end: int = 0
    """Token that ends an output. Tokens below it are text."""
    first_time: int | None = None
    """The first of the tokens of time stamps, which follow all others in the order of time. Time
    stamps begin an output and are pairs, and time does not run backwards. One comes where all
    of them together are likelier than every other token. None: there are no rules for them."""
    end_of_times: int = 0
    """Token after the last time stamp."""
    end_of_first_times: int = 0
    """Token after the last time stamp that an output may begin with."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready to be scheduled."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """Seed of this request's random stream, never None: drawn for the user when not given."""
    eos_token_id: int | None
    """The token that ends the output silently; None when the request ignores it."""
    stop_token_ids: frozenset[int] = frozenset()
    """Other tokens that end the output, reported as stop reason."""
    model_end_token_ids: frozenset[int] = frozenset()
    """The model's end tokens among them. A grammar allows them only where the output may end."""
    bad_words_token_ids: list[list[int]] = []
    max_total_tokens: int
    """Prompt and output tokens at which the request ends with reason "length"."""
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    """Requests share cached prefixes only when their salts are equal."""
    grammar: Grammar | None = None
    """None while `sampling_params.guided_decoding` is not compiled, or not set."""
    cache_extra_keys: tuple[CacheKey, ...] = ()
    """Keys of data other than token ids that decides the content of the KV cache: adapters, media,
    embeddings. Blocks before the position of a key are shared with requests that do not have it."""
    pooling_params: PoolingParams | None = None
    """Parameters of a request to a pooling model, which samples nothing; None: the request
    generates tokens."""
    token_type_ids: list[int] | None = None
    """One per prompt token, for models that tell the parts of a pair apart; None: all 0."""
    embeddings: tuple[TokenEmbeddings, ...] = ()
    """Embeddings of the prompt, in order of their positions. The tokens that they replace are
    placeholders, and `cache_extra_keys` has a key of each."""
    positions: TokenPositions | None = None
    """Positions of the tokens; `cache_extra_keys` has keys of them. None: the position of a token
    is its index."""
    media: tuple[MediaItem, ...] = ()
    """Images, sounds and videos of the prompt, in order of their tokens. `cache_extra_keys` has a
    key of each."""
    adapter: AdapterRef | None = None
    """Adapter. `cache_extra_keys` contains its key."""
    output_rules: OutputRules | None = None
    """Rules of the model; None: it has none, or the request limits its tokens itself."""

    @property
    def known_prompt_token_ids(self) -> list[int] | None:
        """The prompt tokens; None if the prompt was given as embeddings."""
        return None if self.embeddings else self.prompt_token_ids

    @property
    def may_have_drafts(self) -> bool:
        """Whether drafts are possible: it samples, and no logits processor must be called per
        token.
        """
        return self.pooling_params is None and not self.sampling_params.logits_processors

    @property
    def end_token_ids(self) -> list[int]:
        """All tokens that end the output."""
        eos = [] if self.eos_token_id is None else [self.eos_token_id]
        return [*eos, *sorted(self.stop_token_ids)]

    @property
    def allows_several_decodes(self) -> bool:
        """Whether one step may run several decodes of the request.

        False if the host is needed after each token, for log-probabilities or for sampling.
        """
        return (
            self.pooling_params is None
            and self.sampling_params.logprobs is None
            and not self.follows_output
            and len(self.end_token_ids) <= MAX_END_TOKENS
        )

    @property
    def follows_output(self) -> bool:
        """Whether sampling depends on which tokens were generated, not only on their number.

        It does with penalties, a grammar, bad words of several tokens, logits processors, time
        stamps.
        """
        params, rules = self.sampling_params, self.output_rules
        return (
            (rules is not None and rules.first_time is not None)
            or bool(params.presence_penalty or params.frequency_penalty)
            or params.repetition_penalty != 1
            or params.guided_decoding is not None
            or bool(params.logits_processors)
            or any(len(word) > 1 for word in self.bad_words_token_ids)
        )


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters the batch: first admission, or return after preemption."""

    row: int
    request: EngineRequest
    output_token_ids: list[int]
    """Tokens sampled before a preemption; empty at first admission."""
    block_ids: list[int]
    """Block tables of the request, one per group of layers, concatenated; all are equally long."""


class BlockMoves(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that are moved before a step, so that blocks of running requests have low ids."""

    renamed: IntArray
    """[n, 2] (old, new) number of a block of running requests, in the tables that a runner has."""
    copied: IntArray
    """[m, 2] (source, target) blocks whose content moves, or shape [0]: none. All are read before
    any is written, or by parts of an even number: the two of an exchange are at 2i and 2i + 1."""


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of the scheduler for one step.

    They are applied in this order: move blocks, shorten block tables, free batch indices, add new
    requests, add blocks, drop and encode media, run.

    A runner that splits a step into forward passes runs decodes first and keeps prefills in the
    order of `rows`: a later one may read blocks that an earlier one, or its own forward pass,
    writes. A step without requests is neither executed nor updated. Arrays may belong to the
    scheduler: they must only be read.

    A request may have drafts: guesses of its next tokens, which run after its newest token. The
    runner samples after each of them and returns the sampled tokens up to and including the first
    that differs from its draft. Such a request is scheduled again when its result is known.

    Or it has several decodes: all requests run their newest token, sample the next, run that, and
    so on. The runner may run fewer decodes than requested; if it knows the tokens, it stops after
    the first decode that finishes a request. Such requests are also scheduled again when the result
    is known.
    """

    step_id: int
    freed_rows: list[int]
    """Rows whose request has finished, was cancelled or preempted since the last step."""
    new_requests: list[NewRequest]
    rows: IntArray
    """[n] batch indices that run: requests with one token, then requests with drafts, then
    prefills."""
    num_computed_tokens: IntArray
    """[n] tokens whose KV is in the cache; the first scheduled token has this position."""
    num_scheduled_tokens: IntArray
    """[n] tokens to run, at least 1, drafts included."""
    block_rows: IntArray
    """[m] rows that get one more block each, in the order of their tables. A row that gets several
    blocks occurs several times; its entries are adjacent."""
    block_ids: IntArray
    """[m * groups] the blocks: one of each request for every group of layers, one group after
    another."""
    passed_blocks: list[tuple[int, int, int]] = []
    """(row, group, n): the first n blocks of the row's table for this group of layers are freed;
    the null block replaces them."""
    num_draft_tokens: IntArray | None = None
    """[n] number of drafts among the scheduled tokens of each row, which are the last ones; None if
    no row has drafts."""
    draft_token_ids: IntArray | None = None
    """[sum of `num_draft_tokens`] the drafts, request by request, or `DRAFT_OF_WORKER` instead of
    all of them; None if there are none."""
    shortened_tables: list[tuple[int, int]] = []
    """(row, n): the row keeps the first n blocks of its table; the others belonged to rejected
    drafts."""
    block_moves: BlockMoves | None = None
    """Moves of blocks. All other block ids in this message are the ids after the moves."""
    restored_states: IntArray | None = None
    """[k, 2] (row, kept state): rows that begin with a copy of a kept state; None: no row does."""
    kept_states: IntArray | None = None
    """[l, 3] (row, n, kept state): the states of the row after n of its tokens in this step are
    copied there; in the order of n for each row. An n of 0 or less counts back from the end of its
    replayed tokens. None: none are."""
    num_replayed_tokens: IntArray | None = None
    """[n] tokens that the recurrent state of each row lacks: they ran with drafts in its last step
    and were right. Their keys and values are in the cache. None: no row has any."""
    dropped_media: list[str] = []
    """Keys of images whose embeddings are no longer kept."""
    encoded_media: list[tuple[int, int, int, int]] = []
    """(row, n, first, end): before tokens run, encode the parts from `first` to `end` of item n of
    `EngineRequest.media` of the request of the row. With its last part the item is whole, and its
    embeddings are kept. The row may have no tokens in this step, even if it is new."""
    num_decodes: int = 1
    """Maximum number of decodes that this step runs for each request, one after the other. If it is
    above 1, every request of the step is decoding, and has blocks for this many tokens."""

    @property
    def num_tokens(self) -> int:
        """Largest number of tokens that the whole step can run."""
        return int(self.num_scheduled_tokens.sum()) * self.num_decodes


class LogprobRows(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of consecutive positions of one request.

    Column 0 is the sampled (or, for prompts, the actual) token; the others are the most likely
    tokens, in order.
    """

    token_ids: IntArray
    """[positions, 1 + k]"""
    logprobs: FloatArray
    """[positions, 1 + k]"""
    ranks: IntArray
    """[positions] rank of column 0 in the vocabulary, 1 is the most likely."""

    def first(self, count: int) -> "LogprobRows":
        """Return the first `count` positions."""
        if count >= len(self.ranks):
            return self
        return LogprobRows(
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            ranks=self.ranks[:count],
        )


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step."""

    step_id: int
    rows: IntArray
    """[m] rows that sampled, in the order of `SchedulerOutput.rows`."""
    token_ids: IntArray
    """[sum of `num_tokens`] next tokens of the requests, row by row."""
    num_tokens: IntArray | None = None
    """[m] tokens of each row; None: one each. A row without drafts has one. A row with d drafts
    has 0 to 1 + d; with 0 it runs its newest token again. With several decodes a row has at least
    1, and what it has after a token that ends it is dropped."""
    logprobs: dict[int, LogprobRows] = {}
    """row -> one position per token, for rows that asked."""
    prompt_logprobs: dict[int, LogprobRows] = {}
    """row -> one entry per position p of this step's chunk, for prompt token p + 1; rows that
    asked."""
    errors: dict[int, str] = {}
    """Batch index -> reason why sampling failed for this request only; its token ids are
    meaningless."""
    pooled: dict[int, FloatArray] = {}
    """row -> result of a pooling model for a prompt that is computed now: [numbers], or
    [tokens, numbers] with one result per token. Such rows have no token id."""

    def with_errors(self, errors: Mapping[int, str]) -> "ModelRunnerOutput":
        """Return this result with errors of the first pipeline stage added, where images are
        encoded.
        """
        if not errors:
            return self
        return msgspec.structs.replace(self, errors={**self.errors, **errors})


class StepTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a `ModelRunnerOutput` that pipeline stages need which do not sample."""

    step_id: int
    token_ids: IntArray
    num_tokens: IntArray | None = None

    @classmethod
    def of(cls, output: ModelRunnerOutput) -> "StepTokens":
        """Return the tokens of an output."""
        return cls(step_id=output.step_id, token_ids=output.token_ids, num_tokens=output.num_tokens)


NO_TOKEN_LEFT = (
    "no token can be sampled: the logits have NaN or infinity, or every token is forbidden"
)
NO_ALLOWED_TOKEN = "the grammar allows none of allowed_token_ids at this point of the output"
"""Errors that fields of a request which contradict each other can cause."""


class Finished(msgspec.Struct, frozen=True):
    """The end of a request: its id, and the reason."""

    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    is_refused: bool = False
    """The error is a mistake in the request, not a failure of the engine."""


LAUNCH_FIELDS = 8
"""Values of a forward pass in `RunnerStats.recent_launches`."""


class RunnerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a worker since it started. They only grow."""

    num_steps: int = 0
    num_useful_tokens: int = 0
    """Tokens of requests that went through the model."""
    num_padded_tokens: int = 0
    """Tokens of padding that the model additionally processed."""
    num_bucket_hits: int = 0
    """Launches whose shape had run before; 0 on a device without buckets."""
    num_bucket_misses: int = 0
    """First launches of a shape that was not warmed up."""
    num_late_compilations: int = 0
    """Graphs compiled after the warm-up."""
    num_encoded_items: int = 0
    """Images that the encoder has encoded."""
    encode_seconds: float = 0.0
    """Seconds of the encoder."""
    num_decode_blocks: int = 0
    """KV blocks that decodes had to read; 0 on a device without buckets."""
    num_padded_blocks: int = 0
    """KV blocks of padding that decodes read as well."""
    recent_launches: tuple[int, ...] = ()
    """Forward passes of the last two steps that have ended: how many there were since the start,
    and for each of the last ones its phase, batch, query length and blocks, these three sizes
    padded, and its microseconds (0: unknown)."""


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of KV blocks outside of the KV cache, which only grow."""

    num_queries: int = 0
    """Prompt tokens, in full blocks that the KV cache had not, that were looked up elsewhere."""
    num_hits: int = 0
    """Tokens among `num_queries` whose blocks were loaded."""
    num_loaded_bytes: int = 0
    """Bytes of blocks written into the KV cache."""
    num_saved_bytes: int = 0
    """Bytes of blocks read out of the KV cache."""


class MediaStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of the embeddings of images, which only grow."""

    num_queries: int = 0
    """Images that prompts needed, each counted once for each request."""
    num_hits: int = 0
    """Images that were needed and whose embeddings were kept. The others were encoded."""


class DraftStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of drafts, which only grow."""

    num_drafts: int = 0
    """Number of times that a request had drafts in a step."""
    num_draft_tokens: int = 0
    """Number of draft tokens."""
    accepted: tuple[int, ...] = ()
    """Accepted drafts, by position: the first drafts of all requests, the second ones, and so
    on."""
    num_declined_steps: int = 0
    """Steps of decodes without drafts because drafts would have cost more time than they save."""


class WarmUpStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of a warm-up that continues while the engine serves."""

    is_warming: bool = False
    num_warm: int = 0
    """Buckets in use."""
    num_wanted: int = 0
    """Number of buckets when the warm-up is complete; 0: all were warmed up before the first
    request, or there are none."""
    seconds_left: float | None = None
    """Seconds until the warm-up is complete, at the present load; None: unknown."""
    longest_delay_s: float = 0.0
    """The longest time for which a step of the engine has waited for the warm-up."""
    padded_share: float | None = None
    """Fraction of the predicted device time of the traffic so far that would be padding with the
    buckets in use; None: there was none."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine core after a step, and counters, which only grow."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the blocks that requests hold, 0 to 1."""
    num_kv_blocks: int = 0
    """Number of blocks, without the null block."""
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    """Tokens among `num_prefix_queries` that were found in the prefix cache."""
    num_preemptions: int = 0
    running_adapters: list[str] = []
    """Names of the LoRA adapters of running requests."""
    waiting_adapters: list[str] = []
    """Names of the adapters of waiting requests."""
    drafts: DraftStats = DraftStats()
    transfer: TransferStats = TransferStats()
    media: MediaStats = MediaStats()
    warm_up: WarmUpStats = WarmUpStats()
    runner: RunnerStats = RunnerStats()


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one step for all requests, as parallel lists."""

    request_ids: list[str] = []
    token_ids: list[int] = []
    """The new tokens, request by request."""
    num_tokens: list[int] | None = None
    """New tokens of each entry of `request_ids`, at least 1; None: one each."""
    finished: dict[str, Finished] = {}
    """Requests that ended, with or without a token in this output."""
    logprobs: dict[str, LogprobRows] = {}
    prompt_logprobs: dict[str, LogprobRows] = {}
    num_cached_tokens: dict[str, int] = {}
    """Prefix-cache hits of requests admitted for the first time."""
    scheduled_times: dict[str, float] = {}
    """When requests were admitted for the first time, in seconds of `time.time()`."""
    pooled: dict[str, FloatArray] = {}
    """Results of a pooling model, [numbers] or [tokens, numbers], of requests in `finished`."""

    def split(self, ids: Container[str]) -> "tuple[EngineOutput, EngineOutput]":
        """Split into the outputs of the requests with these ids, and the outputs of all others."""
        parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, dict):
                parts[0][name] = {key: each for key, each in value.items() if key in ids}
                parts[1][name] = {key: each for key, each in value.items() if key not in ids}
        counts = self.num_tokens or [1] * len(self.request_ids)
        for part in parts:
            part.update(request_ids=[], token_ids=[], num_tokens=[])
        begin = 0
        for request_id, count in zip(self.request_ids, counts, strict=True):
            part = parts[request_id not in ids]
            part["request_ids"].append(request_id)
            part["token_ids"] += self.token_ids[begin : begin + count]
            part["num_tokens"].append(count)
            begin += count
        return EngineOutput(**parts[0]), EngineOutput(**parts[1])


class _CacheEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base class of cache events; a message starts with the name of its class."""


class BlockStored(_CacheEvent, frozen=True, kw_only=True):
    """Consecutive blocks were added to the prefix cache."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first one; None: they begin a prompt."""
    token_ids: list[int]
    """Tokens of all of the blocks."""
    block_size: int
    """Tokens per block."""
    lora_id: int | None
    """`lora_int_id` of the adapter that they were computed with; None: there was none."""
    medium: str | None = None
    """Always None: the memory of the device."""
    lora_name: str | None = None
    extra_keys: list[list[tuple[str, int]] | None] | None = None
    """For each block: (identity of an image, sound or video, its first token, counted from the
    beginning of the block and negative in later blocks) of all that decide the content of the
    block. None: nothing does but tokens and the adapter."""


class BlockRemoved(_CacheEvent, frozen=True, kw_only=True):
    """Blocks were removed from the prefix cache."""

    block_hashes: list[int]


class AllBlocksCleared(_CacheEvent, frozen=True, kw_only=True):
    """The prefix cache was emptied."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Events of one step."""

    ts: float
    """Seconds of `time.time()`."""
    events: list[Any]


class KVEventBatch(EventBatch, frozen=True, kw_only=True):
    """Events of the KV cache."""

    events: list[CacheEvent]
