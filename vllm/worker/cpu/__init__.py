"""The worker of the CPU."""
