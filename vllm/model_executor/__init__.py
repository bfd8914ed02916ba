"""Models, their layers, and how weights get into them."""
