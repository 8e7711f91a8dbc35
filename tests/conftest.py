"""Double precision for every test, decided before JAX is imported; tests of float32 turn it off locally."""

import os

os.environ.setdefault("JAX_ENABLE_X64", "1")
# Several test processes share few cores: threads of their own inside each would only get in each other's way.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
