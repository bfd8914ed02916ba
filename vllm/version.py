"""The version of this package: the only place that holds it. Imports nothing."""

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
