"""Convert users' prompts and parameters to requests of the engine core."""
