"""Marks of tests that start a Dask cluster."""

import pytest

QUIET = [  # of warnings of the cluster's own making
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
