"""Parts of vision towers. Independent of model families."""
