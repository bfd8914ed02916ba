"""The LoRA adapters of the requests in the batch."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.lora.layers import AdapterLayers, LoadedAdapter
from vllm.messages import AdapterRef, EngineRequest, IntArray
from vllm.model_executor.models.interface import CausalLM
from vllm.worker.launch import Launch

logger = init_logger(__name__)

AdapterTokens = tuple[tuple[LoadedAdapter, Tensor], ...]
"""Adapters of a launch, each with the indices [n] int64 of its tokens."""


class Adapters:
    """Adapters in memory, and the rows that use them.

    The adapter that was used least recently is dropped when there are too many; those of running
    requests stay. An adapter that cannot be read fails the requests that name it, and no other one.

    Args:
        config: of the engine.
        model: loaded.
        device: of the model.
    """

    def __init__(self, config: VllmConfig, model: CausalLM, device: torch.device) -> None:
        dtype = config.lora.lora_dtype
        name = config.model.dtype_name if dtype == "auto" else dtype
        self._layers = AdapterLayers(model, config.lora.max_lora_rank, getattr(torch, name))
        self._most = config.lora.num_in_host_memory
        self._device = device
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._loading: dict[str, Future[None]] = {}
        self._rows: dict[int, AdapterRef] = {}
        self._in_use: Counter[str] = Counter()
        self._errors: dict[int, str] = {}

    def prepare(self, request: EngineRequest) -> Future[None] | None:
        """Load the adapter of a request in the background.

        Returns:
            Done when it is loaded, or when that failed: then the request fails in its first step.
            None: nothing has to be loaded.
        """
        adapter = request.adapter
        if adapter is None:
            return None
        with self._lock:
            if adapter.key in self._loaded:
                self._loaded.move_to_end(adapter.key)
                return None
            future = self._loading.get(adapter.key)
            if future is not None:
                return future
            future = self._loading[adapter.key] = Future()
        args = (adapter, future)
        threading.Thread(target=self._load_early, args=args, name="adapter", daemon=True).start()
        return future

    def add(self, row: int, request: EngineRequest) -> None:
        """Place a request in the row."""
        adapter = request.adapter
        if adapter is None:
            return
        self._rows[row] = adapter
        self._in_use[adapter.key] += 1
        try:
            self._find(adapter)
        except RequestError as error:
            self._errors[row] = str(error)

    def remove(self, row: int) -> None:
        """Clear the row."""
        self._errors.pop(row, None)
        adapter = self._rows.pop(row, None)
        if adapter is not None:
            self._in_use[adapter.key] -= 1
            if not self._in_use[adapter.key]:
                del self._in_use[adapter.key]

    def has_any(self, rows: IntArray) -> bool:
        """Whether a request in one of the rows has an adapter."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows.tolist())

    def errors_of(self, rows: Iterable[int]) -> dict[int, str]:
        """row -> why its adapter could not be loaded."""
        return {row: self._errors[row] for row in rows if row in self._errors}

    def select(self, launch: Launch, starts: IntArray) -> AdapterTokens | None:
        """The adapters of a launch; None if no token has one.

        Args:
            launch: n rows.
            starts: [n or more] where the tokens of each row begin among those of the launch.
        """
        if not self.has_any(launch.rows):
            return None
        tokens: dict[str, list[Any]] = {}
        adapters: dict[str, AdapterRef] = {}
        for index, row in enumerate(launch.rows.tolist()):
            adapter = self._rows.get(row)
            if adapter is None or row in self._errors:
                continue
            first = int(starts[index])
            end = first + int(launch.num_scheduled_tokens[index])
            tokens.setdefault(adapter.key, []).append(np.arange(first, end))
            adapters[adapter.key] = adapter
        found = [
            (self._find(adapters[key]), torch.from_numpy(np.concatenate(parts)).to(self._device))
            for key, parts in tokens.items()
        ]
        return tuple(found) or None

    def _find(self, adapter: AdapterRef) -> LoadedAdapter:
        """The adapter, read now if it was dropped since `prepare`.

        Raises:
            RequestError: it cannot be read.
        """
        with self._lock:
            loaded = self._loaded.get(adapter.key)
        return self._load(adapter) if loaded is None else loaded

    def _load_early(self, adapter: AdapterRef, future: Future[None]) -> None:
        try:
            self._load(adapter)
        # whatever it is, only the request fails: `add` reads the adapter again and has the error
        except Exception as error:
            logger.warning("the LoRA adapter %r could not be loaded: %s", adapter.name, error)
        finally:
            with self._lock:
                del self._loading[adapter.key]
            future.set_result(None)

    def _load(self, adapter: AdapterRef) -> LoadedAdapter:
        try:
            loaded = self._layers.load(Path(adapter.path))
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"the LoRA adapter {adapter.name!r} cannot be loaded: {error}"
            ) from error
        with self._lock:
            self._loaded[adapter.key] = loaded
            unused = [key for key in self._loaded if not self._in_use[key] and key != adapter.key]
            for key in unused[: max(0, len(self._loaded) - self._most)]:
                del self._loaded[key]
        return loaded
