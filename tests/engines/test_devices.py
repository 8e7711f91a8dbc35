"""Rows shared out among devices give the posterior of one device."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import sharded
from jax.sharding import Mesh

from numpyro_rvga import RVGA

SCRIPT = str(Path(sharded.__file__))


def run_script(*arguments):
    environment = os.environ | {"NPROC": "8"}  # XLA's threads: some wait for other devices, and others must be left
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@functools.cache
def on_one_device(name):
    return sharded.found(name)


def check(process, result):
    """Everything that a process found is what one device finds."""
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    with np.load(result) as found:
        assert found["is_shared"]
        names = [name for name in found.files if name != "is_shared"]
        for name in names:
            np.testing.assert_allclose(found[name], on_one_device(name.split(",")[0]), atol=1e-10, rtol=1e-10)
    return names


def test_meshes_of_2_4_and_8_devices(tmp_path):
    result = tmp_path / "found.npz"
    assert len(check(run_script(result, 8), result)) == 5


def test_two_processes_of_two_devices(tmp_path):
    result = tmp_path / "found.npz"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    first, second = (run_script(result, 2, number, 2, port) for number in range(2))
    assert check(first, result) == ["every part of a pass, 4 devices", "batch, 4 devices"]
    second.communicate(timeout=60)
    assert second.returncode == 0


def test_a_mesh_of_one_device_changes_nothing():
    one = sharded.found("every part of a pass", jax.make_mesh((1,), ("anything",)))
    np.testing.assert_array_equal(one, on_one_device("every part of a pass"))


def test_meshes_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh"):
        RVGA(sharded.logistic, mesh=jax.devices())
    two = Mesh(np.array(2 * jax.devices()[:1]), ("rows",))
    for options in ({"block_size": 3}, {"scheme": "explicit"}):
        with pytest.raises(ValueError, match="2 devices cannot share blocks of"):
            RVGA(sharded.logistic, mesh=two, **options)
