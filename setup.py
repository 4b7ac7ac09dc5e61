"""Only what pyproject.toml cannot say: configs/ of the checkout is the data package frugal.configs of a wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["frugal", "frugal.*"]), "frugal.configs"],
    package_dir={"frugal.configs": "configs"},
    package_data={"frugal.configs": ["*.yaml", "accelerate/*.yaml"], "frugal.web": ["templates/*.jinja"]},
)
