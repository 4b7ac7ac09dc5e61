"""Packages and their data files: configs/ of the checkout is the data package frugal.configs of a wheel."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["frugal", "frugal.*"]),
        *("frugal.configs", "frugal.configs.accelerate", "frugal.web.templates"),  # data only
    ],
    package_dir={"frugal.configs": "configs", "frugal.configs.accelerate": "configs/accelerate"},
    package_data={
        "frugal.config": ["foreign_keys.yaml"],
        "frugal.configs": ["*.yaml"],
        "frugal.configs.accelerate": ["*.yaml"],
        "frugal.web.templates": ["*.jinja"],
    },
)
