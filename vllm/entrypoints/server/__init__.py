"""Run the server: its application, its socket, and checks before it listens."""
