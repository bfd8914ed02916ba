"""Read config.json of families that transformers does not read, or not in each of its versions."""
