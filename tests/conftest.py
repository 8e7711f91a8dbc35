"""Settings that are decided before JAX is imported, and fixtures that several files share."""

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

# Double precision for every test; tests of float32 turn it off locally.
os.environ.setdefault("JAX_ENABLE_X64", "1")
# Most of a test's time is compilation: make it fast rather than its result. Several test processes share few cores:
# threads of their own inside each would only get in each other's way.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1"
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"  # half of the compilation; newer versions do not have them
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # each operation would keep where it was called from
# And what one test has compiled need not be compiled for another, nor in another process, nor the next time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Tracing makes millions of objects that stay: to look for cycles as often as by default is a fifth of a test's time.
gc.set_threshold(100_000, 20, 10)


def flags_that_exist() -> str:
    """XLA ends the process at flags that it does not know."""
    flags = f"{FLAGS} {OLDER_EMITTERS}"
    attempt = [sys.executable, "-c", "import jax; jax.devices()"]
    known = subprocess.run(attempt, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, check=False)
    return flags if known.returncode == 0 else FLAGS


if "XLA_FLAGS" not in os.environ:  # the processes of a run inherit them
    os.environ["XLA_FLAGS"] = flags_that_exist()


@pytest.fixture(scope="module")
def import_benchmark() -> Iterator[Callable[[str], ModuleType]]:
    """The name of a module of the benchmarks -> the module. The examples, which some import, are beside it."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("examples", "benchmarks"):
            patch.syspath_prepend(Path(__file__).parents[1] / folder)
        yield pytest.importorskip


@pytest.fixture
def count_compilations() -> Iterator[Callable[[Callable[[], object]], tuple[Counter, object]]]:
    """A function -> what XLA compiles, or takes from a file, while it runs: names with counts; and what it returns."""
    import jax  # here: after the settings above

    names: list[str] = []

    def listen(event: str, *_: object, fun_name: str = "", **__: object) -> None:
        if "backend_compile" in event:
            names.append(fun_name)

    def count(function: Callable[[], object]) -> tuple[Counter, object]:
        names.clear()
        returned = function()
        return Counter(names), returned

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)
