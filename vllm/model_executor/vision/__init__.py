"""Encoders of images: one file for each family, and one for each kind of vision tower."""
