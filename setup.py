"""Add the presets in train_configs/ to the package, as data; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["toolkit*"]), "toolkit.train_configs"],
    package_dir={"toolkit.train_configs": "train_configs"},
)
