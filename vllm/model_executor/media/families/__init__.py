"""Encoders of images: one file for each family, with the name of its rules in `vllm.multimodal`."""
