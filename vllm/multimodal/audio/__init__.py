"""Sound: files to samples, log-mel features, and the settings of feature extractors."""
