"""Implement `vllm quantize`: create a quantized checkpoint from an unquantized one."""
