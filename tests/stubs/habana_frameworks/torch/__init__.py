import os

from habana_frameworks.torch import core, hpu, utils

__all__ = ["core", "hpu", "utils"]

FLAGS = {name: value for name, value in os.environ.items() if name.startswith("PT_HPU")}
"""The bridge reads its flags when it is imported."""
