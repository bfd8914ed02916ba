"""Images of Mistral Small 3.1 and 3.2, and Ministral 3 (Mistral AI 2025)."""

from vllm.multimodal.families.pixtral import PixtralFamily
from vllm.multimodal.interface.checks import config_whole


class Mistral3Family(PixtralFamily):
    """Images with one token for each block of patches, and one token after each row."""

    def read_merge_size(self) -> int:
        return config_whole(self.config, "spatial_merge_size", 2, 2**10)


Family = Mistral3Family
