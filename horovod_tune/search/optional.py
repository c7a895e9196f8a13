"""Searchers of Ray that need a package of their own, imported in this one place.

Each is Ray's class as it is, or a subclass that repairs what current releases of its package broke. If the
package is missing the error names the extra to install.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from horovod_tune.errors import HorovodTuneError

#: Searcher: the module it comes from, the packages it needs, and the extra of horovod_tune that has them.
OPTIONAL = {
    "TuneBOHB": ("horovod_tune.search.bohb", ("hpbandster", "ConfigSpace"), "bohb"),
    "HyperOptSearch": ("ray.tune.search.hyperopt", ("hyperopt",), "hyperopt"),
    "OptunaSearch": ("ray.tune.search.optuna", ("optuna",), "optuna"),
}


class MissingExtra(HorovodTuneError, ImportError):
    """A searcher's package is not installed; the message names the extra to install."""


def load(name: str) -> Any:
    """Return the searcher called `name`. Raises `MissingExtra` if its packages are not installed."""
    module, packages, extra = OPTIONAL[name]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(
            f"{name} needs {' and '.join(missing)}, which is not installed. "
            f"Run `pip install 'horovod_tune[{extra}]'`"
        )
    return getattr(import_module(module), name)
