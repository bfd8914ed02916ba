"""Videos of requests: formats, and the choice of their frames."""
