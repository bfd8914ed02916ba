"""The running server: its application, its socket, and checks before it listens."""
