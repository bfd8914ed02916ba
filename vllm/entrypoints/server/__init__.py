"""What every API of the server shares: the application, its flags, its checks before it listens."""
