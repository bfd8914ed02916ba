"""From tokens of the engine core to what users get."""
