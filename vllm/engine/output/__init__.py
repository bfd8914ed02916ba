"""Convert tokens of the engine core to outputs for users."""
