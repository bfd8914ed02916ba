"""Which sizes an image gets and which tokens stand for it: one file for each family."""
