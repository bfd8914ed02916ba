"""LoRA adapters on the card, in slots of one size that are allocated once at the start."""

import torch

from vllm.attention import LaunchParts
from vllm.bucketing import format_bytes
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.launches import DeviceSlots
from vllm.lora.reader import AdapterReader
from vllm.messages import IntArray
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.parts.adapters import Adapters, adapter_dtype
from vllm.worker.parts.memory_use import MemoryUse, adapters_use

logger = init_logger(__name__)


class DeviceRows(Adapters):
    """LoRA adapters on a card; a forward pass reads the slot of each request from its input.

    The slots are allocated before the memory of forward passes is measured, so they count as
    weights.

    Args:
        config: config of the engine.
        reader: reads adapters for the model.
        bridge: the card.
    """

    def __init__(self, config: VllmConfig, reader: AdapterReader, bridge: HabanaBridge) -> None:
        lora = config.lora
        dtype, device = adapter_dtype(config), bridge.device
        self.slots = DeviceSlots(
            reader.adapted_layers,
            lora.num_slots,
            lora.max_lora_rank,
            dtype,
            device,
            bridge.mark_step,
        )
        self.slots.warm_up()
        logger.info(
            "LoRA: %d adapter slots of rank %d always take %s on the card, even if they are empty",
            lora.num_slots,
            lora.max_lora_rank,
            format_bytes(self.slots.num_bytes),
        )
        super().__init__(config, reader, self.slots)
        self._device, self._config = device, config

    def memory_uses(self) -> list[MemoryUse]:
        return [adapters_use(self._config, self.slots.num_bytes)]

    def part_of_head(self, rows: IntArray) -> LaunchParts:
        slots = torch.from_numpy(self.slot_of_row[rows])
        return {"adapters": self.slots.of_tokens(slots.to(self._device))}
