"""Configuration: a typed schema, TOML files that extend one another, and overrides. Imports no torch."""

from toolkit.config.load import load_config
from toolkit.config.schema import Config

__all__ = ["Config", "load_config"]
