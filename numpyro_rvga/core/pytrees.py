"""Pytrees of arrays."""

from typing import Any

PyTree = Any
"""Arrays in tuples, lists and mappings, of any depth: what a function of the caller's own takes, and is handed."""
