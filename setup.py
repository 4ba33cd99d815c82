"""Packaging. Tool settings live in pyproject.toml, exact versions of a tested set in requirements.lock."""
from pathlib import Path

from setuptools import find_packages, setup

DATA = ["sentencepiece>=0.2", "tiktoken>=0.9", "tokenizers>=0.20", "zstandard>=0.22"]
TENSORBOARD = ["tensorboard>=2.15"]
WANDB = ["wandb>=0.18"]
DEV = ["hypothesis>=6.100", "mypy>=1.13", "pytest>=8", "pytest-timeout>=2.3", "ruff>=0.8", "types-PyYAML>=6"]

# NVIDIA's apex and transformer-engine are found at run time and never named here: the package called apex on
# PyPI is something else, and transformer-engine has to match the CUDA build that is already installed.
setup(
    name="megackpt",
    version="0.1.0",
    description="GPT training in three dimensions of parallelism with exact, cheap activation recomputation",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megackpt", "megackpt.*"]),
    package_data={"megackpt": ["py.typed"]},
    py_modules=["pretrain_gpt"],
    install_requires=["torch>=2.11", "numpy>=1.26", "safetensors>=0.4", "PyYAML>=6"],
    extras_require={
        "data": DATA,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "dev": [*DATA, *TENSORBOARD, *WANDB, *DEV],
        "all": [*DATA, *TENSORBOARD, *WANDB],
    },
    entry_points={"console_scripts": ["megackpt = megackpt.cli.main:main"]},
)
