"""Sound: files and arrays to samples, and samples to the features that models read."""
