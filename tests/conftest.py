"""Double precision for every test, decided before JAX is imported; tests of float32 turn it off locally."""

import os

os.environ.setdefault("JAX_ENABLE_X64", "1")
# Most of a test's time is compilation: make it fast rather than its result. Several test processes share few cores:
# threads of their own inside each would only get in each other's way.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false")
