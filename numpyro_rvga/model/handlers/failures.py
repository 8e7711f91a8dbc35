"""Why a model could not be read, in words for its author."""

from __future__ import annotations

import traceback
from pathlib import Path

import jax

from ..data.arguments import NotRows

PACKAGES = ("jax", "jaxlib", "numpy", "numpyro", "numpyro_rvga")
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


def readable(error: Exception) -> Exception:
    """The error of a model that fails on all of its data, or what it means."""
    if not needs_numbers(error):
        return error
    return ValueError(
        f"the model needs the value of a latent site{_in_line(error)}, and no sampler by gradients has it when it "
        "reads the model. Choose by jnp.where(condition, a, b), not by if; index by integers, not by conditions."
    )


def of_stream(error: Exception) -> Exception:
    """What an error means for rows that come block by block."""
    if needs_numbers(error):
        return ValueError(
            f"the model needs the values of the data{_in_line(error)}, and those of a stream have none when the model "
            "is read. Compute this beforehand and pass it as a keyword argument, as in run(blocks, num_groups=12), "
            f"choose by jnp.where, not by if; or give {_JOINTLY}"
        )
    if isinstance(error, CoupledRows) or (isinstance(error, ValueError) and "improper prior" in str(error)):
        return type(error)(f"{error} Or give {_JOINTLY}")
    return error


_JOINTLY = (
    "all rows at once, which are then solved for jointly: RVGA(model).run({'x': x, 'y': y}) with arrays, and "
    "block_size, first_block, memory, dynamics, checkpoint and init left out."
)


def _in_line(error: BaseException) -> str:
    """The line of the author's code that an error came from."""
    frames, at = [], error
    while at is not None:
        frames = [f for f in traceback.extract_tb(at.__traceback__) if not _is_of_packages(f.filename)] or frames
        at = at.__cause__
    if not frames:
        return ""
    return f" in line {frames[-1].lineno} of {Path(frames[-1].filename).name} ({frames[-1].line})"


def _is_of_packages(filename: str) -> bool:
    return any(part in PACKAGES for part in Path(filename).parts) or filename.startswith("<")
