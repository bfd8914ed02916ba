"""Memory of a card: measuring, predicting, moving to the host and back."""
