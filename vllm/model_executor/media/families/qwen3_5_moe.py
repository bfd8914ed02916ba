"""The vision tower of Qwen 3.5 and 3.6 with experts, which is the same as without."""

from vllm.model_executor.media.families.qwen3_5 import Qwen3_5Encoder

Encoder = Qwen3_5Encoder
