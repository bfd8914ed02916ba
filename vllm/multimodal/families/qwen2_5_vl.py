"""Images of Qwen2.5-VL (arXiv 2502.13923), which are as in Qwen2-VL."""

from vllm.multimodal.families.qwen2_vl import Qwen2VLFamily

Family = Qwen2VLFamily
