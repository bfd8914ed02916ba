"""The interface of a worker: the one table of its methods.

Each method of `Worker` is an entry: its name, arguments, result and docstring. Programs may call
the methods of `WorkerForUsers` by name (`collective_rpc`); all others are only for the engine. The
start sequence of an executor is

    load(rank)              the model, or the part of it that this rank runs
    join(rendezvous)           the other ranks, if there are several
    measure()               -> MemoryReport; the executor takes the least of all ranks
    allocate(num_blocks)    the KV cache, the same number of blocks on every rank
    next_warm_up, warm_up   what must have run before the first request, step by step
    execute_model           steps

The messages contain no tensors, so a worker may run in another process.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from vllm.config import VllmConfig
from vllm.messages import EngineRequest, ModelRunnerOutput, RunnerStats, SchedulerOutput, StepTokens
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
    """Windows of the groups of layers that have block tables of their own; None: full attention."""
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
    """One step of a warm-up. All ranks have the same one at the same time."""

    phase: str
    """The phase of the warm-up, for progress reports."""
    name: str
    """Name of the forward pass."""
    index: int
    """Index of the step within its phase, from 1. A bucket with several forward passes has one
    index."""
    total: int
    """Number of steps in the phase. It may change during the warm-up, if forward passes are given
    up."""
    given_up: str | None = None
    """Reason why this launch is given up, such as too little memory; None: it is kept."""
    eta_seconds: float | None = None
    """Estimated seconds until the end of the whole warm-up, as this rank has measured it; None:
    unknown. While the engine serves: seconds of the rest, without the time for requests."""
    expected_s: float | None = None
    """Seconds that the step is expected to take, according to similar steps; None: unknown."""
    must_wait: bool = False
    """Whether the step must wait, because all remaining steps take longer than was allowed; then
    `warm_up` is not called. `expected_s` is the time of the step that is wanted most."""
    num_warm: int = 0
    """Buckets that are in use."""
    num_wanted: int = 0
    """Buckets that there will be at the end; 0: it is not of buckets."""
    padded_share: float | None = None
    """Fraction of the device time that is padding, as in `WarmUpStats`."""


class WarmUpUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's message to all ranks between two steps of a warm-up."""

    given_up: str | None = None
    """Reason why some rank cannot run the last step, so that no rank uses it; None: all of them
    keep it."""
    seconds: float | None = None
    """Seconds that the last step has taken on all ranks; None: it has not run."""
    longest_s: float | None = None
    """Seconds that the next step may take, as far as is known; None: no limit."""


class StepHandleLike(Protocol):
    """A step in flight, whose result can be waited for."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the result of the step and return it."""
        ...


class WorkerForUsers(Protocol):
    """The methods of a worker that programs may call by name."""

    def get_model(self) -> "nn.Module":
        """Return the model. Works only in the worker's process, since a model cannot be sent."""
        ...

    def reload_weights(self, weights_path: str | None = None) -> None:
        """Read the weights again; if they sleep, when they wake up.

        Args:
            weights_path: folder of a checkpoint for the same model; None: the one that was read
                last.

        Raises:
            WeightLoadError: it cannot be read, or does not fit the model; nothing has changed.
        """
        ...

    def reset_measurements(self) -> None:
        """Reset the measured values (`QUANT_CONFIG`, mode MEASURE)."""
        ...

    def save_measurements(self, adds: bool | None = None) -> str:
        """Write the measured values (`QUANT_CONFIG`, mode MEASURE) to a file, and return its path.

        Args:
            adds: merge with the existing file, from an earlier run of the same model. None: like
                the last call.

        Raises:
            RequestError: the engine does not measure.
            ConfigError: the file cannot be written.
        """
        ...

    def sleeping_tags(self) -> list[str]:
        """Return the parts that sleep: a list that may contain "weights" and "kv_cache"."""
        ...

    def start_profile(self) -> None:
        """Begin a trace of the worker's computation.

        Raises:
            RequestError: there is no folder for it, or a trace is being recorded already.
        """
        ...

    def stop_profile(self) -> str:
        """End the trace, and return the path of its file.

        Raises:
            RequestError: no trace is being recorded.
        """
        ...

    def stats(self) -> RunnerStats:
        """Return counters since the start. Cheap enough to call after every step."""
        ...


class Worker(WorkerForUsers, Protocol):
    """One device, its part of the model, and its KV cache.

    The methods defined here are only for the engine: they change its own state, or rely on its
    checks.
    """

    num_local_ranks: int
    """Workers on this machine, which share its cores and memory."""

    def __init__(self, config: VllmConfig) -> None: ...

    def load(self, rank: int) -> None:
        """Build the model and load its weights.

        Args:
            rank: rank of this worker among the workers of the executor.
        """
        ...

    def join(self, rendezvous: "Rendezvous") -> None:
        """Connect to the other ranks, if there are any; all of them must have loaded.

        Args:
            rendezvous: rendezvous of the ranks.
        """
        ...

    def measure(self) -> MemoryReport:
        """Measure how much memory is left for the KV cache.

        Raises:
            ConfigError: it would not hold one request of max_model_len tokens.
        """
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache.

        Args:
            num_blocks: number of blocks, the null block included; at most as many as reported.
        """
        ...

    def next_warm_up(self, update: WarmUpUpdate) -> WarmUpStep | None:
        """Finish the last step of the warm-up, and return the next one.

        Args:
            update: result of the last step, and the limit of the next one.

        Returns:
            The next step; `given_up` is set if this rank knows that it has no memory for it.
            None: there is no other. Later calls return the steps that the start has left out, if
            any, again up to None.

        Raises:
            ConfigError: too much was given up to serve any request.
        """
        ...

    def warm_up(self) -> str | None:
        """Run the step that `next_warm_up` has returned; return why this rank cannot, or None."""
        ...

    def describe_engine(self) -> dict[str, Any] | None:
        """Return the fields of `cost_model.run_times.RunEngine`, for records of measured times.

        None if times of forward passes do not describe the device.
        """
        ...

    def list_buckets(self) -> list[tuple[int, int, int, int, bool]]:
        """Return (phase, batch, query length, blocks, is warmed up) of each bucket.

        It includes buckets that are still to be warmed up. Empty on a device without buckets.
        """
        ...

    def replace_buckets(self, buckets: Sequence[Sequence[int]]) -> bool:
        """Begin to replace the buckets of forward passes.

        The next steps of the warm-up run the new buckets, which are used from then on; the last
        step disables the old ones. All ranks are asked between the same two steps.

        Args:
            buckets: phase, batch, query length and blocks of each.

        Returns:
            Whether there is anything to warm up. False while other buckets are being warmed up, and
            on a device without buckets.
        """
        ...

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step; at most one other may be in flight.

        In a pipeline, only the result of the last stage has tokens.
        """
        ...

    def record_tokens(self, tokens: StepTokens) -> None:
        """Record the tokens of a step that the last stage of a pipeline has sampled.

        Not called on the last stage itself. A request runs again only after this call.
        """
        ...

    def prepare(self, request: EngineRequest) -> Future[str | None] | None:
        """Load in the background what the steps of a request need; see `Executor.prepare`."""
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Free what requests have needed, when they have ended; see `Executor.release`."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache; no step may be in flight.

        Level 1 keeps the content of the weights, level 2 keeps nothing. The KV cache is lost.
        """
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again: all of it, or only the parts with these tags."""
        ...

    def cache_fingerprint(self) -> bytes:
        """Return a hash of everything except tokens that the content of KV blocks depends on."""
        ...

    def block_bytes(self) -> int:
        """Return the bytes of a KV block in all layers of this rank."""
        ...

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        """Return the bytes of each KV block, in all layers of this rank."""
        ...

    def write_blocks(self, block_ids: list[int], blocks: list[list[bytes]]) -> bool:
        """Write KV blocks that `read_blocks` has returned.

        Args:
            block_ids: ids of the blocks.
            blocks: the bytes of each block, rank by rank.

        Returns:
            False if one of them has the wrong size; then nothing was written.
        """
        ...

    def load_adapter(self, name: str, path: str, key: str, number: int) -> str | None:
        """Load a LoRA adapter in the background.

        Args:
            name: name; see `AdapterRef`.
            path: path; see `AdapterRef`.
            key: key; see `AdapterRef`.
            number: number; see `AdapterRef`.

        Returns:
            "" if it is loaded, the reason if it cannot be, or None while it is being loaded.
        """
        ...

    def unload_adapter(self, number: int) -> bool:
        """Drop a LoRA adapter; return False if it is not loaded."""
        ...

    def pin_adapter(self, number: int) -> bool:
        """Keep a LoRA adapter in memory permanently; return False if that is not possible."""
        ...

    def adapter_numbers(self) -> list[int]:
        """Return the ids of the LoRA adapters in memory."""
        ...

    def has_adapter(self, number: int, key: str) -> bool:
        """Return whether the LoRA adapter with this id is in memory with this content (`key`)."""
        ...


USER_METHODS = methods_of(WorkerForUsers)
ENGINE_METHODS = methods_of(Worker) - USER_METHODS
