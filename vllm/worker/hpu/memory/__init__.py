"""Memory of a card: measured, forecast, moved to the host and back."""
