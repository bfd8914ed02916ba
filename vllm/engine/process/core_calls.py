"""Define all calls of an engine core, except requests.

Each method of `CoreCalls` is an entry: its name, arguments, result and docstring. `EngineCore` has
these methods. `LLMEngine` calls them in its own process, `AsyncLLM` by a message to each core.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm.executor import WorkerMethod
from vllm.utils.methods import methods_of


class CoreCalls(Protocol):
    """The calls of an engine core. All of them run between two steps."""

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False and changes nothing while requests run."""
        ...

    def reset_mm_cache(self) -> bool:
        """Drop the embeddings of images that no running request reads. Returns True."""
        ...

    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, between two steps.

        Args:
            method: name of a method of the worker or of its `worker_extension_cls`; or a function,
                which gets the worker as its first argument.
            timeout: seconds to wait; None: no limit. It only has an effect if steps run in a
                thread; the call itself is not aborted.
            args, kwargs: arguments of the call.

        Returns:
            One result per worker.

        Raises:
            RequestError: the workers have no such method, or only the engine may call it.
            TimeoutError: the call took longer than `timeout`.
            EngineDeadError: the engine was shut down or has failed.
        """
        ...

    def call_workers(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker for the engine itself.

        Args:
            method: name of a method of `Worker`.
            args, kwargs: arguments of the call.

        Returns:
            One result per worker.

        Raises:
            EngineDeadError: the engine has failed.
        """
        ...

    def replace_buckets(self, buckets: Sequence[Sequence[int]]) -> bool:
        """Begin to warm up new buckets, which replace the present ones when all of them are warm.

        Args:
            buckets: phase, batch size, query length and blocks of each bucket.

        Returns:
            Whether there is anything to warm up. Also False while another warm-up runs.

        Raises:
            EngineDeadError: the engine has failed.
        """
        ...

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache until `wake_up`.

        Cached prefixes are dropped, and requests are refused meanwhile (status 503). Needs
        `enable_sleep_mode`.

        Args:
            level: 1 keeps the content of the weights; 2 keeps nothing, and `wake_up` reads the
                checkpoint again. See docs/engine_control.md.

        Raises:
            RequestError: sleep mode is off, or the level does not exist.
            CapacityError: some requests have not ended (status 409).
            EngineDeadError: the engine was shut down or has failed.
        """
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the released memory again. Requests are accepted when all of it is allocated.

        Args:
            tags: "weights", "kv_cache" or both; None: both.

        Raises:
            RequestError: sleep mode is off, or there is no such tag.
            WeightLoadError: the weights cannot be read again; they remain released. A core in
                another process raises WorkerCallError instead.
            EngineDeadError: the engine was shut down or has failed.
        """
        ...

    def is_sleeping(self) -> bool:
        """Return whether the memory of weights or KV cache is released."""
        ...


CORE_CALLS = methods_of(CoreCalls)
