"""Texts: cut for the log, read as a stream, matched with patterns."""
