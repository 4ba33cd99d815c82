"""dtype policy: which number format each kind of value has."""

from megackpt.precision.policy import Precision

__all__ = ["Precision"]
