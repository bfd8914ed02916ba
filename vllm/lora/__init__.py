"""Manage LoRA adapters: how a request names one, their files, and the layers that they change."""
