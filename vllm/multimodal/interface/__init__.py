"""What media are, and what a family of models says about them. Knows no families."""
