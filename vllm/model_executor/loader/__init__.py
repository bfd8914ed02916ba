"""Loads a folder of checkpoint files into a model that is ready to run."""

from vllm.model_executor.loader.model_loader import load_model, load_speculator

__all__ = ["load_model", "load_speculator"]
