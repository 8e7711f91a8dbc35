"""From a NumPyro model to a flat parameter, a prior and one factor per row: the only room that knows handlers."""

from .program import Program

__all__ = ["Program"]
