"""Keep the module names of vLLM's usage statistics, which this package does not collect."""
