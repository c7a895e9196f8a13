"""Detects a trial's changes to the modules that stay: one pass over them, by identity, in some ten ms.

A *container* is a module, a class, or one of the dicts, lists, sets and objects that those contain. `Watch`
compares each with its earlier contents, and restores functions, classes, and attributes that were added or
removed. It returns other differences, because of which the process is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

# Ray, this package and what they use change all the time, and no training function sets them. The last six
# are tables of thousands of constants.
_UNWATCHED = {"ray", "horovod_tune", "google", "grpc", "msgpack", "psutil", "cloudpickle", "__main__"}
_UNWATCHED |= {"sympy", "mpmath", "charset_normalizer", "wcwidth", "torchgen", "_ast"}
# torch's compiler, a fourth of a new worker's modules: of these, only the packages and their settings.
_COMPILER = tuple(
    f"torch.{name}."
    for name in (
        *("_dynamo", "_inductor", "_functorch", "_higher_order_ops", "_subclasses", "_refs", "_numpy"),
        *("_decomp", "testing", "distributed.tensor", "utils._sympy"),
    )
)
# Modules of the standard library whose containers programs change; those of others are mostly caches.
_WATCHED_STANDARD = (
    *("calendar", "copyreg", "csv", "gettext", "json", "mimetypes", "multiprocessing.reduction"),
    *("shutil", "urllib"),
)
# Modules with functions whose defaults, code or attributes programs change.
_WITH_FUNCTIONS = ("torch.nn", "torch.optim", "torch.utils.data", "torch.distributions", "horovod")
# What libraries record for themselves, which training functions do not notice. A name that is missing here
# costs new processes, not wrong results.
_BOOKKEEPING = {
    *("_cupti_monitor_checked", "_SIGCHLD_handler_set", "next_id", "__warningregistry__", "__slotnames__"),
    *("_handle_map", "_distributed_opaque_types_registered", "_max_vals", "_min_vals", "cls_counter"),
    *("concrete_type_store", "_lazy_seed_tracker", "hide", "_dir", "_global_uid"),
    # torch's registry of operators that were called, its counters of fake tensors, and FSDP2's classes.
    *("singleton", "DESCRIBER_NEXT_ID", "simple_call_counter", "cls_to_fsdp_cls"),
    "_CAN_RECORD_REGISTRY",  # Transformers': classes of models
}
# The same for CUDA: its state (there is a context, its generators), and operators that are registered at
# their first use.
_CUDA_NAMES = ("torch.cuda.", "torch.library._defs.triton::", "torch._TritonLibrary.")
# Accelerate's singletons, of which every object shares one dict: empty until the first is made.
_SINGLETONS = "_shared_state"
_LEAF_TYPES = (
    *(str, bytes, int, float, complex, tuple, frozenset, type(None), property, staticmethod),
    *(classmethod, BuiltinFunctionType, ModuleType),
)
# Types of which there are thousands of objects (torch's and NumPy's operators), whose attributes are caches.
_OPERATOR_TYPES = ("OpOverload", "OpOverloadPacket", "ufunc", "_ArrayFunctionDispatcher", "Library", "Logger")
# How deep to follow references from a module: to the contents of a dict in one of its objects.
_DEPTH = 2
# A container with more elements is a table of torch's or Python's.
_MAX_ELEMENTS = 1500
_MISSING = object()


def _parts_of(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__, *function.__dict__


class _Container(NamedTuple):
    name: str
    owner: Any
    # Return the contents as they are now.
    read_keys: Callable[[], Iterable[Any]]
    read: Callable[[], Iterable[Any]]
    keys: Collection[Any]
    values: list[Any]

    def now(self) -> _Container:
        return self._replace(keys=list(self.read_keys()), values=list(self.read()))

    def items(self) -> dict[Any, Any]:
        return dict(zip(self.keys, self.values, strict=False))


class Watch:
    """The contents of modules when they were added, with changes that were accepted since."""

    def __init__(self) -> None:
        self._containers: dict[int, _Container] = {}
        self._parts: dict[FunctionType, tuple[Any, ...]] = {}
        # What imports of libraries have put into containers of other modules.
        self.registered: list[Any] = []

    def add(self, modules: Iterable[Any]) -> None:
        """Watch these modules too, with their present contents."""
        for module in modules:
            name = module.__name__ if isinstance(module, ModuleType) else "__main__"
            if _top(name) not in _UNWATCHED and (not name.startswith(_COMPILER) or name.endswith("config")):
                self._add(module, name, _top(name), _DEPTH)

    def _add(self, owner: Any, name: str, top: str, depth: int) -> None:
        contents = None if id(owner) in self._containers else _contents_of(owner, top, name)
        if contents is None:
            return
        read_keys, read = _readers(contents)
        container = _Container(name, owner, read_keys, read, list(read_keys()), list(read()))
        self._containers[id(owner)] = container
        for key, value in zip(container.keys, container.values, strict=True):
            if type(value) is FunctionType:
                if str(value.__module__).startswith(_WITH_FUNCTIONS):
                    self._parts[value] = _parts_of(value)
                    if value.__kwdefaults__:
                        self._add(value.__kwdefaults__, f"{name}.{key}.__kwdefaults__", top, depth=0)
            # Not isinstance(), since a proxy's `__class__` may raise.
            elif depth and not issubclass(type(value), _LEAF_TYPES):
                is_pythons = isinstance(key, str) and (key.startswith("__") or key.endswith("member_map_"))
                if not is_pythons or key == "__constants__":
                    self._add(value, f"{name}.{key}", top, depth - 1)

    def forget(self, packages: Collection[str]) -> None:
        """Stop watching the modules of these packages, which were removed."""
        if packages:
            containers = list(self._containers.items())
            self._containers = {
                number: each for number, each in containers if _top(each.name) not in packages
            }

    def differing(self) -> dict[int, _Container]:
        """Return the containers whose contents have changed, with their present contents."""
        found = {}
        for number, container in list(self._containers.items()):  # another thread may import meanwhile
            try:
                if list(container.read()) == container.values:
                    continue
            except Exception:  # any: comparing objects may raise, and only different ones are compared
                pass
            with contextlib.suppress(RuntimeError):  # a library's thread changes it meanwhile
                found[number] = container.now()
        return found

    def accept(self, before: dict[int, _Container]) -> None:
        """Accept changes since ``before``, which `differing` returned before an import."""
        for number, now in self.differing().items():
            known = self._containers[number]
            then = before.get(number, known).items()
            new = {key: value for key, value in now.items().items() if then.get(key, _MISSING) is not value}
            self.registered += [*new, *new.values()]
            if number in before:
                kept = known.items() | new
                now = known._replace(keys=list(kept), values=list(kept.values()))
            self._containers[number] = now

    def restore(self) -> list[str]:
        """Restore what can be restored; return the other changes."""
        changed = [each for each, parts in self._parts.items() if _parts_of(each) != parts]
        problems = [f"{each.__module__}.{each.__qualname__}" for each in changed]
        self._parts |= zip(changed, map(_parts_of, changed), strict=True)
        for number, now in self.differing().items():
            known = self._containers[number]
            then, current = known.items(), now.items()
            if not then and isinstance(known.owner, dict) and known.name.endswith(_SINGLETONS):
                known.owner.clear()
                continue
            for key in then | current:
                old, new = then.get(key, _MISSING), current.get(key, _MISSING)
                name = f"{known.name}.{key}"
                if old is not new and not _restore(known.owner, key, old, new) and not _is_bookkeeping(name):
                    problems.append(name)
            self._containers[number] = known.now()
        return [f"{name} was changed" for name in problems]


def _restore(owner: Any, key: Any, old: Any, new: Any) -> bool:
    """Restore an attribute of a module or class; return True if nothing remains to be done."""
    if not isinstance(owner, ModuleType | type):
        return _are_equal(old, new)
    if issubclass(type(new), ModuleType) and old is _MISSING and sys.modules.get(new.__name__) is new:
        return True  # an imported submodule
    try:
        if old is _MISSING:
            delattr(owner, key)
        elif callable(old) or hasattr(type(old), "__get__") or old is None:
            setattr(owner, key, old)
        else:
            return _are_equal(old, new)
    except Exception:  # any that a class of a library raises
        return False
    return True


def _are_equal(old: Any, new: Any) -> bool:
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # any: tensors, for example, cannot be compared like this
        return False


def _is_bookkeeping(name: str) -> bool:
    is_known = name.startswith(_CUDA_NAMES) or not _BOOKKEEPING.isdisjoint(name.split("."))
    return is_known or "cache" in name.lower()


def _contents_of(owner: Any, top: str, name: str) -> Any:
    """Return the contents of ``owner`` as a mapping, list or set; None if they are not watched."""
    kind = type(owner)
    if issubclass(kind, ModuleType):
        return vars(owner)
    if issubclass(kind, type):
        # Some hundred types like torch.cuda.FloatTensor have hundreds of attributes each.
        is_tops = _belongs(owner.__dict__.get("__module__"), top) and kind.__name__ != "tensortype"
        return vars(owner) if is_tops else None
    if top == "horovod" or owner is sys.modules:
        return None  # Horovod's objects belong to its world
    if top in sys.stdlib_module_names and not name.startswith(_WATCHED_STANDARD):
        return None
    if issubclass(kind, dict | list | set):
        return None if len([*_readers(owner)[1]()]) > _MAX_ELEMENTS else owner
    if not _belongs(kind.__module__, top) or kind.__name__ in _OPERATOR_TYPES:
        return None
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception:  # any: a class may raise on attribute access
        return None
    return attributes if type(attributes) is dict else None


def _readers(contents: Any) -> tuple[Callable[[], Iterable[Any]], Callable[[], Iterable[Any]]]:
    """Return functions that read the keys and the values of ``contents``.

    They call the built-in types' methods, since a subclass's may do anything: Transformers' import every
    model.
    """
    if isinstance(contents, list):
        return lambda: range(list.__len__(contents)), functools.partial(list.copy, contents)
    if isinstance(contents, set):
        return (functools.partial(set.copy, contents),) * 2
    if isinstance(contents, dict):
        return functools.partial(dict.keys, contents), functools.partial(dict.values, contents)
    return contents.keys, contents.values  # of a class


def _belongs(module: Any, top: str) -> bool:
    return isinstance(module, str) and _top(module).lstrip("_") == top.lstrip("_")


def _top(name: str) -> str:
    return name.partition(".")[0]
