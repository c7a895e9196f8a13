"""Fixtures for everything that needs more than one host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "testbed"))

from job_packages import job_packages
from lab import PROGRAMS, SLURM_PROGRAMS, reason_to_skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "cluster: real hosts as network namespaces; needs root and Debian packages"
    )


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    """Skip with the reason if this machine cannot simulate several hosts."""
    if reason := reason_to_skip(PROGRAMS):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def jobs_possible(hosts_possible: None) -> None:
    """Skip with the reason if Ray's job system is not available."""
    try:
        job_packages()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def slurm_possible(hosts_possible: None) -> None:
    """Skip with the reason if Slurm is not installed."""
    if reason := reason_to_skip({**PROGRAMS, **SLURM_PROGRAMS}):
        pytest.skip(reason)
