"""Names of vLLM's V1 engine, for programs that import them; the classes live in `vllm.engine`."""
