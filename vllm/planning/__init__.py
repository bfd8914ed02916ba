"""Plans of engines for a device that does not have to be in this machine: `vllm plan`."""
