"""The encoders of images, sound and video. Their layers are independent of model families."""
