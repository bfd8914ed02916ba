"""The encoders of images, sound and video. Their parts know no families."""
