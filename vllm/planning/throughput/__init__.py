"""The throughput of a planned engine, and the cards that meet goals."""
