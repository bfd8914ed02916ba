"""The LoRA adapters of the requests in the batch."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.lora.launches import AdapterStore, HostSlots, RaggedAdapters
from vllm.lora.layers import AdapterLayers
from vllm.lora.slots import AdapterSlots
from vllm.messages import AdapterRef, EngineRequest, IntArray
from vllm.model_executor.models.interface import CausalLM
from vllm.ops.low_rank import AdaptedRows

logger = init_logger(__name__)


class Adapters:
    """Adapters in memory, and the rows that use them.

    The adapter that was used least recently is dropped when there are too many; those of running
    requests stay, and those that are pinned. An adapter that cannot be read fails the requests that
    name it, and no other one.

    Args:
        config: of the engine.
        layers: of its model.
        store: has the adapters in use.

    Attributes:
        slot_of_row: [rows + 1] int32: slot of the adapter of each row; -1: it has none. The last
            row is padding.
    """

    def __init__(self, config: VllmConfig, layers: AdapterLayers, store: AdapterStore) -> None:
        self._layers = layers
        self._store = store
        self._slots = AdapterSlots(config.lora.max_loras)
        self._most = config.lora.num_in_host_memory
        self.slot_of_row: IntArray = np.full(config.scheduler.max_num_seqs + 1, -1, np.int32)
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, Any] = OrderedDict()
        """By key: as the store has prepared them."""
        self._loading: dict[str, Future[None]] = {}
        self._failures: dict[str, str] = {}
        """By key: why it could not be loaded, until `load` has told it."""
        self._keys: dict[int, str] = {}
        """Number of an adapter that is loaded -> its key."""
        self._pinned: set[str] = set()
        self._rows: dict[int, AdapterRef] = {}
        self._errors: dict[int, str] = {}

    def prepare(self, request: EngineRequest) -> Future[None] | None:
        """Load the adapter of a request in the background.

        Returns:
            Done when it is loaded, or when that failed: then the request fails in its first step.
            None: nothing has to be loaded.
        """
        return None if request.adapter is None else self._begin(request.adapter)

    def _begin(self, adapter: AdapterRef) -> Future[None] | None:
        with self._lock:
            if adapter.key in self._loaded:
                self._loaded.move_to_end(adapter.key)
                self._keys[adapter.number] = adapter.key
                return None
            future = self._loading.get(adapter.key)
            if future is not None:
                return future
            future = self._loading[adapter.key] = Future()
        args = (adapter, future)
        threading.Thread(target=self._load_early, args=args, name="adapter", daemon=True).start()
        return future

    def load(self, adapter: AdapterRef) -> str | None:
        """Load an adapter in the background, if that has not begun. To be called until it is done.

        Returns:
            Why it cannot be loaded; empty: it is loaded; None: it is being loaded.
        """
        with self._lock:
            if (reason := self._failures.pop(adapter.key, None)) is not None:
                return reason
        return "" if self._begin(adapter) is None else None

    def unload(self, number: int) -> bool:
        """Drop an adapter from memory; requests that use it go on. False: it is not loaded."""
        with self._lock:
            key = self._keys.get(number)
            if key is None:
                return False
            self._drop(key)
            return True

    def pin(self, number: int) -> bool:
        """Keep an adapter in memory until it is unloaded. False: it is not loaded, or no place
        would be left for those that are not pinned."""
        with self._lock:
            key = self._keys.get(number)
            if key is None or len(self._pinned | {key}) > max(1, self._most - 1):
                return False
            self._pinned.add(key)
            return True

    def numbers(self) -> list[int]:
        """Of the adapters in memory."""
        with self._lock:
            return sorted(self._keys)

    def _drop(self, key: str) -> None:
        self._loaded.pop(key, None)
        self._pinned.discard(key)
        self._keys = {number: each for number, each in self._keys.items() if each != key}

    def add(self, row: int, request: EngineRequest) -> None:
        """Place a request in the row."""
        adapter = request.adapter
        if adapter is None:
            return
        try:
            loaded = self._find(adapter)
        except RequestError as error:
            self._errors[row] = str(error)
            return
        slot, is_new = self._slots.take(adapter.key)
        self._rows[row] = adapter
        self.slot_of_row[row] = slot
        if is_new:
            self._store.put(slot, loaded)

    def remove(self, row: int) -> None:
        """Clear the row."""
        self._errors.pop(row, None)
        adapter = self._rows.pop(row, None)
        if adapter is not None:
            self._slots.release(adapter.key)
            self.slot_of_row[row] = -1

    def errors_of(self, rows: Iterable[int]) -> dict[int, str]:
        """row -> why its adapter could not be loaded."""
        return {row: self._errors[row] for row in rows if row in self._errors}

    def _find(self, adapter: AdapterRef) -> Any:
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
            with self._lock:
                self._failures[adapter.key] = str(error)
        finally:
            with self._lock:
                del self._loading[adapter.key]
            future.set_result(None)

    def _load(self, adapter: AdapterRef) -> Any:
        try:
            loaded = self._store.prepare(self._layers.load(Path(adapter.path)))
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"the LoRA adapter {adapter.name!r} cannot be loaded: {error}"
            ) from error
        with self._lock:
            self._failures.pop(adapter.key, None)
            self._loaded[adapter.key] = loaded
            self._keys[adapter.number] = adapter.key
            others = [key for key in self._loaded if key not in {adapter.key, *self._pinned}]
            unused = [key for key in others if not self._slots.has(key)]
            for key in unused[: max(0, len(self._loaded) - self._most)]:
                self._drop(key)
        return loaded


class RaggedRows(Adapters):
    """Adapters on a device that accepts any shape.

    Args:
        config: of the engine.
        layers: of its model.
    """

    def __init__(self, config: VllmConfig, layers: AdapterLayers) -> None:
        dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        self._host = HostSlots(layers.places, config.lora.max_loras, dtype)
        super().__init__(config, layers, self._host)

    def of_rows(self, rows: IntArray, counts: IntArray | None = None) -> AdaptedRows | None:
        """The adapters of the tokens of a launch; None if no token has one.

        Args:
            rows: of the launch.
            counts: tokens of each; None: one.
        """
        slots = self.slot_of_row[rows]
        if slots.max(initial=-1) < 0:
            return None
        if counts is not None:
            slots = np.repeat(slots, counts)
        return AdaptedRows(tuple(self._host.adapters), torch.from_numpy(slots))

    def select(self, rows: IntArray, counts: IntArray) -> RaggedAdapters | None:
        """The same for the layers of a model."""
        found = self.of_rows(rows, counts)
        return None if found is None else RaggedAdapters(found)


def adapter_layers(config: VllmConfig, model: CausalLM) -> AdapterLayers:
    """The layers of a loaded model that adapters can change; they accept adapters from here on."""
    return AdapterLayers(model, config.lora.max_lora_rank, adapter_dtype(config))


def adapter_dtype(config: VllmConfig) -> torch.dtype:
    """Of the weights of adapters."""
    dtype = config.lora.lora_dtype
    name = config.model.dtype_name if dtype == "auto" else dtype
    found: torch.dtype = getattr(torch, name)
    return found
