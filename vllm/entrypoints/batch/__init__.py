"""Implement `vllm run-batch`: read its lines, and call the routes without a socket."""
