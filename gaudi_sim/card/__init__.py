"""The device itself: its tensors, memory, clock and recipes."""
