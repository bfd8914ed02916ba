"""Images and videos of Qwen 3.5 and 3.6 (Qwen team 2026)."""

from vllm.multimodal.families.qwen3_vl import Qwen3VLFamily


class Qwen3_5Family(Qwen3VLFamily):
    """Qwen3-VL whose language model reads the last layer of the tower only."""

    @property
    def num_added(self) -> int:
        return 0


Family = Qwen3_5Family
