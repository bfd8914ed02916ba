"""Parts of encoders of images: towers, and what several families share."""
