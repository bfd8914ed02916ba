"""The simulated device itself: its tensors, memory, clock and recipes."""
