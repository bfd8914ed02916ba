"""The sizes and tokens of images: one file for each family."""
