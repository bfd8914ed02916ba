"""The version of this package, which is defined only here. Imports nothing."""

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
