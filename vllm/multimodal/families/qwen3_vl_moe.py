"""Images of Qwen3-VL with experts, which are the same as without."""

from vllm.multimodal.families.qwen3_vl import Qwen3VLFamily

Family = Qwen3VLFamily
