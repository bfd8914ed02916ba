"""Share code between the ways to use the engine: context and arguments of the server, media, beam
search, scores.
"""
