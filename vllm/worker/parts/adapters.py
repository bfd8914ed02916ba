"""The LoRA adapters of the requests in the batch."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.attention import LaunchParts
from vllm.config import VllmConfig
from vllm.errors import RequestError
from vllm.lora.launches import AdapterStore, HostSlots
from vllm.lora.layers import AdapterLayers
from vllm.lora.memory import AdapterMemory
from vllm.lora.reader import AdapterReader
from vllm.lora.slots import AdapterSlots
from vllm.messages import AdapterRef, EngineRequest, IntArray, NewRequest
from vllm.model_executor.models.interface import CausalLM
from vllm.ops.cpu.threads import compute_alone
from vllm.utils.background_work import Throttle, start_in_time_slices
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.row_parts import RowPart

_STILL_BUSY_S = 0.25
"""So long after a step has begun, the next one is expected, or it runs."""


class StepClock:
    """Knows whether steps are running. One thread notes them, others may ask."""

    def __init__(self) -> None:
        self._began = -_STILL_BUSY_S

    def note(self) -> None:
        """Note that a step begins."""
        self._began = time.monotonic()

    def is_busy(self) -> bool:
        """Return whether a step has begun within the last moments, so that steps probably run."""
        return time.monotonic() - self._began < _STILL_BUSY_S


def run_in_background(work: Callable[[], None]) -> None:
    """Run work in a thread that takes one core and holds the interpreter lock only briefly.

    A step needs the interpreter lock several times, and waits for it each time.
    """

    def run() -> None:
        compute_alone()
        work()

    start_in_time_slices(run, "adapter")


class Adapters(RowPart):
    """The requests that use LoRA adapters, and the slots of these adapters.

    An adapter is in memory from `prepare` of a request to its end, so no step waits for one. An
    adapter that cannot be read fails only the requests that name it.

    Args:
        config: config of the engine.
        reader: reads adapters for the model.
        store: holds the adapters in use.

    Attributes:
        memory: holds the adapters in host memory.
        slot_of_row: [rows + 1] int32: adapter slot of each batch index; -1: none. The last entry is
            padding.
    """

    def __init__(self, config: VllmConfig, reader: AdapterReader, store: AdapterStore) -> None:
        self._reader = reader
        self._store = store
        self._slots = AdapterSlots(config.lora.num_slots)
        self._steps = StepClock()
        """While steps run, adapters are read in short slices of time."""
        self.memory = AdapterMemory(self._read, config.lora.num_in_host_memory, run_in_background)
        self.slot_of_row: IntArray = np.full(config.scheduler.max_num_seqs + 1, -1, np.int32)
        self._rows: dict[int, tuple[str, str]] = {}
        """Row -> request and key of its adapter."""
        self._errors: dict[int, str] = {}

    def prepare(self, request: EngineRequest) -> Future[str | None] | None:
        """Load the adapter of a request in the background, and keep it until `release`.

        Returns:
            A future: None when it is loaded, or the reason why it cannot be. None: nothing has to
                be loaded.
        """
        if request.adapter is None:
            return None
        return self.memory.hold(request.request_id, request.adapter)

    def release(self, request_ids: Iterable[str]) -> None:
        """Release the adapters of requests that have ended and will not run again.

        The requests may still be in the batch.
        """
        ended = set(request_ids)
        for row, (request_id, _) in list(self._rows.items()):
            if request_id in ended:
                self.remove(row)
        for request_id in ended:
            self.memory.release(request_id)
        self._tidy()

    def unload(self, number: int) -> bool:
        """Drop an adapter from memory; return False if it is not loaded.

        Requests that use it continue.
        """
        is_found = self.memory.unload(number)
        self._tidy()
        return is_found

    def _tidy(self) -> None:
        """Clear adapter slots that are neither in use nor have an adapter in memory."""
        for key in self._slots.unused():
            if not self.memory.has(key):
                self._store.clear(self._slots.forget(key))

    def note_step(self) -> None:
        self._steps.note()

    def add(self, new: NewRequest) -> None:
        row, request = new.row, new.request
        adapter = request.adapter
        if adapter is None:
            return
        try:
            loaded = self.memory.held(request.request_id)
        except RequestError as error:
            self._errors[row] = str(error)
            return
        self._tidy()
        slot, is_new = self._slots.take(adapter.key)
        self._rows[row] = request.request_id, adapter.key
        self.slot_of_row[row] = slot
        if is_new:
            self._store.put(slot, loaded)

    def remove(self, row: int) -> None:
        """Clear the adapter of this batch index."""
        self._errors.pop(row, None)
        if row in self._rows:
            _, key = self._rows.pop(row)
            self._slots.release(key)
            self.slot_of_row[row] = -1

    def errors_of(self, rows: IntArray) -> dict[int, str]:
        """Return the reasons why adapters of these requests could not be loaded, by batch index."""
        if not self._errors:
            return {}
        return {row: self._errors[row] for row in rows.tolist() if row in self._errors}

    def _read(self, adapter: AdapterRef) -> Any:
        try:
            pause = Throttle(self._steps.is_busy).pause
            return self._store.prepare(self._reader.load(Path(adapter.path), pause), pause)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"the LoRA adapter {adapter.name!r} cannot be loaded: {error!r}"
            ) from error


class RaggedRows(Adapters):
    """LoRA adapters on a device that runs any shape.

    Args:
        config: config of the engine.
        reader: reads adapters for the model.
    """

    def __init__(self, config: VllmConfig, reader: AdapterReader) -> None:
        dtype: torch.dtype = getattr(torch, config.model.dtype_name)
        self._host = HostSlots(reader.adapted_layers, config.lora.num_slots, dtype)
        super().__init__(config, reader, self._host)

    def part_of(self, launch: Launch) -> LaunchParts:
        slots = self.slot_of_row[launch.rows]
        if slots.max(initial=-1) < 0:
            return {}
        return self._of_tokens(np.repeat(slots, launch.num_scheduled_tokens))

    def part_of_head(self, rows: IntArray) -> LaunchParts:
        """Return the adapters of these requests for the output head; empty if none changes it."""
        slots = self.slot_of_row[rows]
        found = (self._host.adapters[slot] for slot in set(slots.tolist()) - {-1})
        if not any(each is not None and each.changes_head for each in found):
            return {}
        return self._of_tokens(slots)

    def _of_tokens(self, slots: IntArray) -> LaunchParts:
        return {"adapters": self._host.of_tokens(torch.from_numpy(slots))}


def adapter_reader(
    config: VllmConfig, model: CausalLM, *, has_experts: bool = True, is_padded: bool = False
) -> AdapterReader:
    """Make a reader of adapters for a loaded model, and let its layers accept adapters.

    Args:
        has_experts: adapters may change experts if `lora_target_modules` is not set.
        is_padded: whether all adapters are padded to `max_lora_rank`.

    Raises:
        ConfigError: the model has no module of a name in `lora_target_modules`.
    """
    known = (config.model.model, config.model.path, *(config.model.served_model_name or ()))
    names = [name for name in known if name]
    rank, dtype = config.lora.max_lora_rank, adapter_dtype(config)
    modules = config.lora.lora_target_modules
    layers = AdapterLayers(model, modules, has_experts=has_experts)
    return AdapterReader(layers, rank, dtype, names, is_padded=is_padded)


def adapter_dtype(config: VllmConfig) -> torch.dtype:
    """Return the dtype of the weights of adapters."""
    dtype = config.lora.lora_dtype
    name = config.model.dtype_name if dtype == "auto" else dtype
    return getattr(torch, name)
