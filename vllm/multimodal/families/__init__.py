"""The sizes and prompt tokens of images and sounds: one file for each family."""
