"""Run the engine core in a separate process."""
