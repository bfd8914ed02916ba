"""Images and videos of Qwen 3.5 and 3.6 (Qwen team 2026), which are as in Qwen3-VL."""

from vllm.multimodal.families.qwen3_vl import Qwen3VLFamily

Family = Qwen3VLFamily
