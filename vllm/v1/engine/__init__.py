"""The engines: `async_llm` and `llm_engine`."""
