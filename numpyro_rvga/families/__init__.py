"""RVGA by the family of q: how each is initialized, updated and run."""
