"""The architecture of a model, read from its config.json."""
