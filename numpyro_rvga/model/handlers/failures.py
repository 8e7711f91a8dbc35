"""Why a model could not be read, in words for its author."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import jax
import jaxlib
import numpy
import numpyro

from ..data.arguments import NotRows

PACKAGE = Path(__file__).parents[2]
PACKAGES = (PACKAGE, *(Path(str(package.__file__)).parent for package in (jax, jaxlib, numpy, numpyro)))
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
GENERATED = ("<frozen", "<string>", "<__array_function__")  # not "<stdin>", which is the author's
FORWARD = (
    "States that follow one another in time are summed out by the forward algorithm, in the model: alpha = "
    "logsumexp(alpha[:, None] + log_transition, axis=0) + log_emission[t] in a lax.scan over t, and then "
    "numpyro.factor('y', logsumexp(alpha))."
)
NEED_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)


class CoupledRows(NotImplementedError):
    """The model cannot be run on some of the rows alone."""


class LocalLatents(CoupledRows):
    """Latent variables of single rows for which their conditional prior cannot stand."""


class LocalStates(LocalLatents):
    """Latent variables of single rows that are all discrete: summing over their states leaves out nothing of q."""


class UnboundedStates(NotImplementedError):
    """Discrete latent variables with too many states to sum over."""


def needs_numbers(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says that a value has no number yet."""
    while error is not None:
        if isinstance(error, NEED_NUMBERS) or "unhashable type: 'DynamicJaxprTracer'" in str(error):
            return True
        error = error.__cause__
    return False


def why_not_rows(error: Exception) -> str:
    """Why a model cannot take single rows, in one sentence."""
    if needs_numbers(error):
        return f"the model needs the values of the data{_in_line(error)}"
    if isinstance(error, (CoupledRows, NotRows, NotImplementedError)) or not traceback.extract_tb(error.__traceback__):
        return str(error)
    return f"on single rows the model fails{_in_line(error)}: {type(error).__name__}: {error}"


def is_fault(error: Exception) -> bool:
    """Whether an error is a fault of this package: none that it raises on purpose, and from no line of the author's."""
    on_purpose = isinstance(error, (ValueError, NotImplementedError)) or needs_numbers(error)
    is_its_own = any(PACKAGE in Path(frame.filename).parents for frame in traceback.extract_tb(error.__traceback__))
    return is_its_own and not on_purpose and not _lines(error)


def readable(error: Exception) -> Exception:
    """The error of a model that fails on all of its data, or what it means."""
    if not needs_numbers(error):
        return error
    return ValueError(
        f"the model needs the value of a latent site{_in_line(error)}, and no sampler by gradients has it when it "
        "reads the model. Choose by jnp.where(condition, a, b), not by if; index by integers, not by conditions."
    )


def of_stream(error: Exception) -> Exception:
    """The error for rows that come block by block."""
    if needs_numbers(error):
        return ValueError(
            f"the model needs the values of the data{_in_line(error)}, and those of a stream have none when the model "
            "is read. Compute this beforehand and pass it as a keyword argument, as in run(blocks, num_groups=12), "
            f"choose by jnp.where, not by if; or give {_JOINTLY}"
        )
    if isinstance(error, LocalLatents):  # all rows at once would not help
        return error
    if isinstance(error, CoupledRows) or (isinstance(error, ValueError) and "improper prior" in str(error)):
        return type(error)(f"{error} Or give {_JOINTLY}")
    return error


_JOINTLY = (
    "all rows at once, which are then solved for jointly: RVGA(model).run({'x': x, 'y': y}) with arrays, and "
    "family, block_size, first_block, memory, dynamics, checkpoint and init left out."
)


def _in_line(error: BaseException) -> str:
    """The line of the author's code that an error came from."""
    lines = _lines(error)
    return f" in line {lines[-1].lineno} of {Path(lines[-1].filename).name} ({lines[-1].line})" if lines else ""


def _lines(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of the author's code that an error, or the first one that led to it, passed through."""
    lines: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:
        lines = [f for f in traceback.extract_tb(cause.__traceback__) if not _is_of_packages(f.filename)] or lines
        cause = cause.__cause__
    return lines


def _is_of_packages(filename: str) -> bool:
    if filename.startswith(GENERATED):
        return True
    parents = Path(filename).parents
    is_standard = STANDARD_LIBRARY in parents and "site-packages" not in Path(filename).parts
    return is_standard or any(package in parents for package in PACKAGES)
