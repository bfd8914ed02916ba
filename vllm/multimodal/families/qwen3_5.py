"""Images and videos of Qwen 3.5 and 3.6 (Qwen team 2026)."""

from vllm.multimodal.families.qwen3_vl import Qwen3VLFamily


class Qwen3_5Family(Qwen3VLFamily):
    """Qwen3-VL images for a language model that reads only the last layer of the tower."""

    @property
    def num_added(self) -> int:
        return 0


Family = Qwen3_5Family
