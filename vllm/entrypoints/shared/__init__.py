"""Share code between all APIs of the server: context and arguments, bodies, errors, streams."""
