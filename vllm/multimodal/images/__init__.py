"""Images: decoding files to pixels, and the settings of image processors."""
