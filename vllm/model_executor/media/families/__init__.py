"""Encoders of images: one file for each family, named like its rules in `vllm.multimodal`."""
