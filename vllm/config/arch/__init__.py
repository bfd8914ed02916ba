"""Read the architecture of a model from its config.json."""
