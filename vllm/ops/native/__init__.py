"""The reference operators in plain torch."""
