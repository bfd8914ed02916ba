"""Routes of speech: a file of sound becomes text."""
