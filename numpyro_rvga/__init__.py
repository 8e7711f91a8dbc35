"""Gaussian posteriors of NumPyro models in one pass over the data.

The public interface is what ``__all__`` names, with :mod:`numpyro_rvga.metrics`, which judges predictions, and
:mod:`numpyro_rvga.distributed`, which runs on Dask clusters. Other modules may change without notice.

From the bottom up: ``core`` is the mathematics, in JAX alone; ``model`` reads a NumPyro model; ``engines`` compile its
updates; ``streams`` bring the rows to these; ``results`` hold what comes out. The methods, ``rvga``, ``bong`` (with its
``presets``) and ``fixed_point``, check their ``options`` and call the rest. ``dynamics`` and ``initialization`` are
options that are objects.
"""

from .bong import BONG
from .dynamics import LinearDynamics, OrnsteinUhlenbeck, RandomWalk
from .fixed_point import FixedPointVI
from .initialization import init_to_module
from .results.posterior import Posterior
from .rvga import RVGA
from .streams.arrow import ParquetRows, arrow_blocks

__all__ = [
    "BONG",
    "RVGA",
    "FixedPointVI",
    "LinearDynamics",
    "OrnsteinUhlenbeck",
    "ParquetRows",
    "Posterior",
    "RandomWalk",
    "arrow_blocks",
    "init_to_module",
]
__version__ = "0.1.0"
