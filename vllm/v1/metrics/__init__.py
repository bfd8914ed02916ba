"""What an engine counts."""
