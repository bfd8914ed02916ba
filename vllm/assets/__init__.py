"""Files for examples that are part of the package."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).parent / "models" / "stdlib-llama-5m"
"""The demonstration model: what runs when no model is named."""

CHAT_TEMPLATES = Path(__file__).parent / "chat_templates"
"""Formats of conversations, for checkpoints that have no template."""
