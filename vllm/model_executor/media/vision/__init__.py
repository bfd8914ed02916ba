"""Parts of vision towers. Know no families."""
