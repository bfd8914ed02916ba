"""What an engine would do on a device that this machine need not have: `vllm plan`."""
