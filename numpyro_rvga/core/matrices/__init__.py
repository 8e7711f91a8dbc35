"""Matrices in the forms that models give them: small and dense, packed as arrows or chains, and rows' Jacobians."""
