"""Configuration: a typed schema, TOML files that extend one another, and overrides. Imports no torch."""

from toolkit.config.load import asks_for_tracebacks, load_config
from toolkit.config.schema import Config

__all__ = ["Config", "asks_for_tracebacks", "load_config"]
