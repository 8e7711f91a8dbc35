"""From a NumPyro model to a flat parameter, a prior and one factor per row: the only room that uses handlers."""

from .program import Program

__all__ = ["Program"]
