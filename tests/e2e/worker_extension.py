"""Methods that tests add to the workers of an engine."""

import os
from pathlib import Path
from typing import Any

import torch


class WorkerExtension:
    """Methods that are added to the worker."""

    runner: Any
    device: Any
    tp: Any

    def describe(self, text: str = "") -> dict[str, Any]:
        """Return the device of the worker, and its memory in use."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"text": text, "device": str(self.device), "resident_pages": pages}

    def process_id(self) -> int:
        """Return the process id of the worker."""
        return os.getpid()

    def num_threads(self) -> int:
        """Return the number of threads that an operator uses."""
        return torch.get_num_threads()

    def card(self) -> list[str | None]:
        """Return the Gaudi cards that a library sees in this process, and the card that the process
        uses.
        """
        return [os.environ.get(name) for name in ("HABANA_VISIBLE_MODULES", "HLS_MODULE_ID")]

    def collectives(self) -> str:
        """Return the name of the class that exchanges tensors."""
        return type(self.tp.collectives).__name__

    def fill_cache(self) -> int:
        """Write every byte of the KV cache. Returns the number of bytes."""
        layers = self.runner.attention_layers
        caches = [cache for m in layers for cache in (m.key_cache, m.value_cache)]
        for cache in caches:
            cache.view(torch.uint8).fill_(1)
        return sum(cache.nbytes for cache in caches)
