"""Import names of vLLM's V1 engine; the classes are in `vllm.engine`."""
