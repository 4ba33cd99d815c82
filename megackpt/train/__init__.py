"""Composition and the loop: from a configuration to a trained model."""

from megackpt.train.loop import run

__all__ = ["run"]
