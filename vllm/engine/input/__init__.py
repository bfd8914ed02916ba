"""From what users send to requests of the engine core."""
