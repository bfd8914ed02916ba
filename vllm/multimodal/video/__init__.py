"""Videos of requests: formats, and the selection of frames."""
