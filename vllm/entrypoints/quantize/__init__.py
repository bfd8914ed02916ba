"""`vllm quantize`: a quantized checkpoint of an unquantized one."""
