"""Environment variables by topic; `vllm.envs` reads them."""
