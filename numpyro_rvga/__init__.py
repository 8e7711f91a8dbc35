"""Gaussian posteriors of NumPyro models in one pass over the data."""

from .posterior import Posterior
from .rvga import RVGA

__all__ = ["RVGA", "Posterior"]
__version__ = "0.1.0"
