"""The vision tower of Qwen3-VL with experts, which is the same as without."""

from vllm.model_executor.media.families.qwen3_vl import Qwen3VLEncoder

Encoder = Qwen3VLEncoder
