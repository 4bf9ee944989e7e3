"""User-level differential privacy for language models: the library on one screen."""

__version__ = "0.1.0"
