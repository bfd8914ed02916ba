"""Provide the Habana bridge: one protocol for a real card and for a simulated one."""
