"""Provide the command line, the class `LLM`, and the HTTP server."""
