"""Plans engines for a device that need not be in this machine (`vllm plan`)."""
