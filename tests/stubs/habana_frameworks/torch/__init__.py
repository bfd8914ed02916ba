from habana_frameworks.torch import core, hpu, utils

__all__ = ["core", "hpu", "utils"]
