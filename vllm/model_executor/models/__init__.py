"""One file per model family, and the registry that finds them."""
