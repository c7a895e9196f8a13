"""One thread for linear algebra while a suggestion is made.

The driver shares its machine with the trials. The matrices here are small, and BLAS threads that wait for one
another on busy cores make a suggestion of 40 ms take seconds. One thread also sums in the same order on any
number of cores, so suggestions do not depend on it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController


@cache
def _controller() -> ThreadpoolController:
    # Looking for the loaded libraries takes milliseconds, so it is done once; NumPy's and SciPy's are there.
    return ThreadpoolController()


def one_thread() -> AbstractContextManager[Any]:
    """Return a context in which BLAS libraries use one thread."""
    return _controller().limit(limits=1, user_api="blas")
