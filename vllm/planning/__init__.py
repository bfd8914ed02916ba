"""Plans of engines for devices that this machine need not have: `vllm plan`."""
