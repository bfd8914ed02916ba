"""The Habana bridge: one protocol, a real card behind it or a simulated one."""
