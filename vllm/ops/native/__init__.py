"""The operators in plain torch."""
