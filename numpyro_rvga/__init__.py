"""Gaussian posteriors of NumPyro models in one pass over the data."""

from .dynamics import LinearDynamics, OrnsteinUhlenbeck, RandomWalk
from .fixed_point import FixedPointVI
from .posterior import Posterior
from .rvga import RVGA

__all__ = ["RVGA", "FixedPointVI", "LinearDynamics", "OrnsteinUhlenbeck", "Posterior", "RandomWalk"]
__version__ = "0.1.0"
