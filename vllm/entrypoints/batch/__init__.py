"""Parts of `vllm run-batch`: its lines, and requests without a socket."""
