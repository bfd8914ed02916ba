"""The interface of a worker: the one table of its methods.

Each method of `Worker` is an entry: its name, arguments, result and docstring. The ones that a
program may call by their name (`collective_rpc`) stand in `WorkerForUsers`; all others are for the
engine alone. The start sequence of an executor is

    load(rank)              the model, or the part of it that this rank runs
    join(meeting)           the other ranks, if there are several
    measure()               -> MemoryReport; the executor takes the least of all ranks
    allocate(num_blocks)    the KV cache, the same number of blocks on every rank
    next_warm_up, warm_up   what must have run before the first request, one launch at a time
    execute_model           steps

The messages here hold no tensors, so that a worker may live in another process.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from vllm.config import VllmConfig
from vllm.messages import (
    EngineRequest,
    ModelRunnerOutput,
    RunnerStats,
    SchedulerOutput,
    StepTokens,
)
from vllm.utils.methods import methods_of

if TYPE_CHECKING:  # these modules load torch, which a server that imports this table does not need
    from torch import nn

    from vllm.distributed import Rendezvous


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The device memory of one rank, measured before its KV cache is allocated."""

    free_bytes: int
    """Bytes that are not used by weights."""
    launch_bytes: int = 0
    """Bytes of `free_bytes` that launches need while they run."""
    warm_up_bytes: int = 0
    """Bytes of `free_bytes` that are reserved for what the warm-up keeps on the device, such as
    graphs."""
    block_bytes: int
    """Bytes of one KV block in all layers of this rank; 0 for a model without a KV cache."""
    windows: tuple[int | None, ...] = (None,)
    """Of the groups of layers that have block tables of their own; None: full attention."""
    num_blocks: int
    """KV blocks that this rank could have, the null block included."""
    num_kept_states: int | None = None
    """Recurrent states of prefixes that this rank can keep; None: its layers have none, or there is
    no prefix cache."""
    num_item_states: int | None = None
    """Hidden states of images and sounds that this rank can keep for cross-attention; None: its
    layers read none."""
    max_image_embeddings: int | None = None
    """Embeddings of the largest image that the encoder has memory for; None: of any."""


class WarmUpStep(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a warm-up. All ranks name the same one at the same time."""

    phase: str
    """The phase of the warm-up, for progress reports."""
    name: str
    """Of the launch."""
    index: int
    """From 1, within the phase. A bucket with several launches has one index."""
    total: int
    """Of the phase. It may change on the way, as launches are given up."""
    given_up: str | None = None
    """Reason why this launch is given up, such as too little memory; None: it is kept."""
    eta_seconds: float | None = None
    """Estimated seconds until the end of the whole warm-up, as this rank has measured it; None:
    unknown. While the engine serves: seconds of the rest, without the time for requests."""
    expected_s: float | None = None
    """Seconds that it will take by those like it; None: unknown."""
    must_wait: bool = False
    """It is not to run now, as all that is left takes longer than was allowed; `warm_up` is not
    called. `expected_s` is the time of the one that is wanted most."""
    num_warm: int = 0
    """Buckets that are in use."""
    num_wanted: int = 0
    """Buckets that there will be at the end; 0: it is not of buckets."""
    padded_share: float | None = None
    """Fraction of the device time that is padding, as in `WarmUpStats`."""


class StepHandleLike(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the result of the step and return it."""
        ...


class WorkerForUsers(Protocol):
    """The methods of a worker that programs may call by their name."""

    def get_model(self) -> "nn.Module":
        """Return the model. It cannot be sent from another process."""
        ...

    def reload_weights(self, weights_path: str | None = None) -> None:
        """Read the weights again. While they sleep, they are read when they wake up.

        Args:
            weights_path: folder of a checkpoint for the same model; None: the one that was read
                last.

        Raises:
            WeightLoadError: it cannot be read, or does not fit the model; nothing has changed.
        """
        ...

    def reset_measurements(self) -> None:
        """Forget what was measured so far (`QUANT_CONFIG`, MEASURE)."""
        ...

    def save_measurements(self, adds: bool | None = None) -> str:
        """Write what was measured (`QUANT_CONFIG`, MEASURE). Returns the path of the file.

        Args:
            adds: to the file that is there, which is of an earlier run with the same model. None:
                as in the last call.

        Raises:
            RequestError: the engine does not measure.
            ConfigError: the file cannot be written.
        """
        ...

    def sleeping_tags(self) -> list[str]:
        """Return the parts that sleep: none, or some of weights and kv_cache."""
        ...

    def start_profile(self) -> None:
        """Begin a trace of what the worker computes.

        Raises:
            RequestError: there is no folder for it, or a trace is being recorded already.
        """
        ...

    def stop_profile(self) -> str:
        """End the trace. Returns the path of its file.

        Raises:
            RequestError: no trace is being recorded.
        """
        ...

    def stats(self) -> RunnerStats:
        """Return counters since the start. Cheap enough to call after every step."""
        ...


class Worker(WorkerForUsers, Protocol):
    """One device, its part of the model, and its KV cache.

    Only the engine calls the methods that stand here, as they change its own state, or need what it
    has checked before.
    """

    num_local_ranks: int
    """Workers on this machine, which share its cores and memory."""

    def __init__(self, config: VllmConfig) -> None: ...

    def load(self, rank: int) -> None:
        """Build the model and read its weights.

        Args:
            rank: of this worker among the workers of the executor.
        """
        ...

    def join(self, meeting: "Rendezvous") -> None:
        """Meet the other ranks, if there are any; all of them have loaded.

        Args:
            meeting: where they meet.
        """
        ...

    def measure(self) -> MemoryReport:
        """Find out how much memory there is for the KV cache.

        Raises:
            ConfigError: it would not hold one request of max_model_len tokens.
        """
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache.

        Args:
            num_blocks: the null block included; no more than were reported.
        """
        ...

    def next_warm_up(
        self,
        given_up: str | None = None,
        seconds: float | None = None,
        longest_s: float | None = None,
    ) -> WarmUpStep | None:
        """Finish the last step of the warm-up, and name the next one.

        Args:
            given_up: why some rank cannot run the last step, so that no rank uses it;
                None: all of them keep it.
            seconds: that the last step has taken on all ranks; None: it has not run.
            longest_s: seconds that the next one may take, as far as is known; None: any.

        Returns:
            The next step; `given_up` is set when this rank knows that it has no memory for it.
            None: there is no other. Later calls name what the start has left, if there is any,
            again up to None.

        Raises:
            ConfigError: too much was given up to serve any request.
        """
        ...

    def warm_up(self) -> str | None:
        """Run the step that `next_warm_up` has named. Returns why this rank cannot run it, or
        None."""
        ...

    def describe_engine(self) -> dict[str, Any] | None:
        """Return the fields of `cost_model.run_times.RunEngine`; None: times of forward passes say
        nothing of the device."""
        ...

    def list_buckets(self) -> list[tuple[int, int, int, int, bool]]:
        """Return phase, batch, query length and blocks of each bucket, and whether it is warmed up;
        the buckets that are still to be warmed up as well. Empty on a device without buckets."""
        ...

    def replace_buckets(self, buckets: Sequence[Sequence[int]]) -> bool:
        """Begin to replace the buckets of forward passes. The next steps of the warm-up run the
        new ones, which are used from then on; the last one takes the old ones out of use. All
        ranks are asked between the same two steps.

        Args:
            buckets: phase, batch, query length and blocks of each.

        Returns:
            Whether there is anything to warm up. Not while other buckets are being warmed up, nor
            on a device without buckets.
        """
        ...

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step; at most one other is in flight. In a pipeline, only the result of the last
        stage has tokens."""
        ...

    def record_tokens(self, tokens: StepTokens) -> None:
        """Note the tokens of a step, which the last stage of a pipeline has sampled; not called on
        the last stage itself. A row runs again only after this."""
        ...

    def prepare(self, request: EngineRequest) -> Future[str | None] | None:
        """Load in the background what the steps of a request need; see `Executor.prepare`."""
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Keep no longer what requests have needed; see `Executor.release`."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache; no step may be in flight."""
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again: all of it, or the memory of the parts with these tags."""
        ...

    def cache_fingerprint(self) -> bytes:
        """Return a hash of everything but tokens that decides the content of KV blocks."""
        ...

    def block_bytes(self) -> int:
        """Return the bytes of a KV block in all layers of this rank."""
        ...

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        """Return the bytes of KV blocks, in all layers of this rank."""
        ...

    def write_blocks(self, block_ids: list[int], blocks: list[list[bytes]]) -> bool:
        """Write KV blocks that `read_blocks` has returned.

        Args:
            block_ids: of the blocks.
            blocks: the bytes of each block, rank by rank.

        Returns:
            False if one of them does not fit: nothing was written.
        """
        ...

    def load_adapter(self, name: str, path: str, key: str, number: int) -> str | None:
        """Load a LoRA adapter in the background.

        Args:
            name, path, key, number: as in `AdapterRef`.

        Returns:
            "" when it is loaded, why it cannot be, or None: it is being loaded.
        """
        ...

    def unload_adapter(self, number: int) -> bool:
        """Drop a LoRA adapter. Returns False if it is not loaded."""
        ...

    def pin_adapter(self, number: int) -> bool:
        """Keep a LoRA adapter in memory. Returns False if that is not possible."""
        ...

    def adapter_numbers(self) -> list[int]:
        """Return the ids of the LoRA adapters in memory."""
        ...

    def has_adapter(self, number: int, key: str) -> bool:
        """Return whether a LoRA adapter in memory has this number, and this content."""
        ...


USER_METHODS = methods_of(WorkerForUsers)
ENGINE_METHODS = methods_of(Worker) - USER_METHODS
