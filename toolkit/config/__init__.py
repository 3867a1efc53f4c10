"""Configuration: a typed schema, TOML files that extend one another, and overrides. Imports no torch."""

from toolkit.config.load import InvalidSettings, asks_for_tracebacks, load_config
from toolkit.config.schema import Config

__all__ = ["Config", "InvalidSettings", "asks_for_tracebacks", "load_config"]
