"""Shared code of all APIs: the application, its flags, and checks before the server listens."""
