"""The command line, the class `LLM`, and the HTTP server."""
