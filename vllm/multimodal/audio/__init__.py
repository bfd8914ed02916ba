"""Sound: from files and arrays to samples, and from samples to features for models."""
