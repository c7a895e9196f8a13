"""Detects a trial's changes to the modules that stay: one pass over them, by identity, in some ten ms.

A *space* is what has named or listed contents: a module, a class, and the dicts, lists, sets and objects that
those hold. `Watch` compares each with what it was and puts functions, classes and removed or added attributes
back. Whatever else differs it returns: the process is then replaced.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

# Of Ray, ours and what Ray talks with: they change all the time, and no training function sets them. The
# last six are tables of thousands of constants.
UNWATCHED = {"ray", "horovod_tune", "google", "grpc", "msgpack", "psutil", "cloudpickle", "__main__"}
UNWATCHED |= {"sympy", "mpmath", "charset_normalizer", "wcwidth", "torchgen", "_ast"}
# Of torch's compiler, a fourth of what a fresh worker has, only the packages themselves and their settings.
_COMPILER = tuple(
    f"torch.{name}."
    for name in (
        *("_dynamo", "_inductor", "_functorch", "_higher_order_ops", "_subclasses", "_refs", "_numpy"),
        *("_decomp", "testing", "distributed.tensor", "utils._sympy"),
    )
)
# Containers of the standard library that programs register in or set. The others are mostly caches.
_STANDARD = (
    *("calendar", "copyreg", "csv", "gettext", "json", "mimetypes", "multiprocessing.reduction"),
    *("shutil", "urllib"),
)
# The modules with functions whose defaults or code programs change.
_WITH_FUNCTIONS = ("torch.nn", "torch.optim", "torch.utils.data", "torch.distributions", "horovod")
# What libraries note down for themselves as they work; its loss or stay is not seen by a training function.
# A name that is missing here costs new processes, not a wrong result.
BOOKKEEPING = {
    *("_cupti_monitor_checked", "_SIGCHLD_handler_set", "next_id", "__warningregistry__", "__slotnames__"),
    *("_handle_map", "_distributed_opaque_types_registered", "_max_vals", "_min_vals", "cls_counter"),
    *("concrete_type_store", "_lazy_seed_tracker", "hide", "_dir", "_global_uid"),
    # torch's registry of operators that were called, its counters of fake tensors, and FSDP2's classes.
    *("singleton", "DESCRIBER_NEXT_ID", "simple_call_counter", "cls_to_fsdp_cls"),
    "_CAN_RECORD_REGISTRY",  # Transformers': classes of models
}
# The same for CUDA: plain values (that there is a context now, its generators), and operators that are
# registered with the first use.
_CUDAS = ("torch.cuda.", "torch.library._defs.triton::", "torch._TritonLibrary.")
# Accelerate's singletons, of which every object shares one dict: empty until the first is made.
_SINGLETONS = "_shared_state"
_NO_SPACE = (
    *(str, bytes, int, float, complex, tuple, frozenset, type(None), property, staticmethod),
    *(classmethod, BuiltinFunctionType, ModuleType),
)
# Thousands of them are torch's and NumPy's operators, whose attributes are caches.
_OPERATORS = ("OpOverload", "OpOverloadPacket", "ufunc", "_ArrayFunctionDispatcher", "Library", "Logger")
# From a module to what a dict in one of its objects holds.
_DEPTH = 2
# A container of more elements is a table of torch's or Python's own.
_MAX_ELEMENTS = 1500
_MISSING = object()
_parts_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class _Space(NamedTuple):
    name: str
    owner: Any
    # Read the contents as they are now.
    read_keys: Callable[[], Iterable[Any]]
    read: Callable[[], Iterable[Any]]
    keys: Collection[Any]
    values: list[Any]

    def now(self) -> _Space:
        return self._replace(keys=list(self.read_keys()), values=list(self.read()))

    def items(self) -> dict[Any, Any]:
        return dict(zip(self.keys, self.values, strict=False))


class Watch:
    """The contents of modules at the time when they were added, or accepted since."""

    def __init__(self) -> None:
        self._spaces: dict[int, _Space] = {}
        self._parts: dict[FunctionType, tuple[Any, ...]] = {}
        # What imports of libraries put into spaces that were there before.
        self.registered: list[Any] = []

    def add(self, modules: Iterable[Any]) -> None:
        """Watch these modules too, as they are now."""
        for module in modules:
            name = module.__name__ if isinstance(module, ModuleType) else "__main__"
            if _top(name) not in UNWATCHED and (not name.startswith(_COMPILER) or name.endswith("config")):
                self._add(module, name, _top(name), _DEPTH)

    def _add(self, owner: Any, name: str, top: str, depth: int) -> None:
        contents = None if id(owner) in self._spaces else _contents_of(owner, top, name)
        if contents is None:
            return
        read_keys, read = _readers(contents)
        space = _Space(name, owner, read_keys, read, list(read_keys()), list(read()))
        self._spaces[id(owner)] = space
        for key, value in zip(space.keys, space.values, strict=True):
            if type(value) is FunctionType:
                if str(value.__module__).startswith(_WITH_FUNCTIONS):
                    self._parts[value] = _parts_of(value)
                    if value.__kwdefaults__:
                        self._add(value.__kwdefaults__, f"{name}.{key}.__kwdefaults__", top, depth=0)
            # Not isinstance(): a proxy's `__class__` may raise.
            elif depth and not issubclass(type(value), _NO_SPACE):
                is_pythons = isinstance(key, str) and (key.startswith("__") or key.endswith("member_map_"))
                if not is_pythons or key == "__constants__":
                    self._add(value, f"{name}.{key}", top, depth - 1)

    def forget(self, packages: Collection[str]) -> None:
        """Watch the modules of these packages, which are dropped, no longer; nor what they held."""
        if packages:
            spaces = self._spaces.items()
            self._spaces = {number: each for number, each in spaces if _top(each.name) not in packages}

    def differing(self) -> dict[int, _Space]:
        """Return the spaces whose contents are not those that are known, as they are now."""
        found = {}
        for number, space in self._spaces.items():
            try:
                if list(space.read()) == space.values:
                    continue
            except Exception:  # any: objects are compared only if they are others
                pass
            with contextlib.suppress(RuntimeError):  # a thread of a library's changes it at this moment
                found[number] = space.now()
        return found

    def accept(self, before: dict[int, _Space]) -> None:
        """Accept changes since ``before`` (of `differing`) as the modules' own."""
        for number, now in self.differing().items():
            known = self._spaces[number]
            then = before.get(number, known).items()
            new = {key: value for key, value in now.items().items() if then.get(key, _MISSING) is not value}
            self.registered += [*new, *new.values()]
            if number in before:
                kept = known.items() | new
                now = known._replace(keys=list(kept), values=list(kept.values()))
            self._spaces[number] = now

    def restore(self) -> list[str]:
        """Restore what can be restored; return what else was changed."""
        changed = [each for each, parts in self._parts.items() if _parts_of(each) != parts]
        problems = [f"{each.__module__}.{each.__qualname__}" for each in changed]
        self._parts |= zip(changed, map(_parts_of, changed), strict=True)
        for number, now in self.differing().items():
            known = self._spaces[number]
            then, current = known.items(), now.items()
            if not then and isinstance(known.owner, dict) and known.name.endswith(_SINGLETONS):
                known.owner.clear()
                continue
            for key in then | current:
                old, new = then.get(key, _MISSING), current.get(key, _MISSING)
                name = f"{known.name}.{key}"
                if old is not new and not _restore(known.owner, key, old, new) and not _is_bookkeeping(name):
                    problems.append(name)
            self._spaces[number] = known.now()
        return [f"{name} was changed" for name in problems]


def _restore(owner: Any, key: Any, old: Any, new: Any) -> bool:
    """Restore an attribute of a module or class; return True if nothing else must be done."""
    if not isinstance(owner, ModuleType | type):
        return _are_equal(old, new)
    if issubclass(type(new), ModuleType) and old is _MISSING and sys.modules.get(new.__name__) is new:
        return True  # a package has got one more of its modules
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
    is_known = name.startswith(_CUDAS) or not BOOKKEEPING.isdisjoint(name.split("."))
    return is_known or "cache" in name.lower()


def _contents_of(owner: Any, top: str, name: str) -> Any:
    """Return the mapping, list or set of what ``owner`` holds; None if it is not watched."""
    kind = type(owner)
    if issubclass(kind, ModuleType):
        return vars(owner)
    if issubclass(kind, type):
        # torch.cuda.FloatTensor and some hundred like it have hundreds of attributes each.
        is_tops = _belongs(owner.__dict__.get("__module__"), top) and kind.__name__ != "tensortype"
        return vars(owner) if is_tops else None
    if top == "horovod" or owner is sys.modules:
        return None  # Horovod's are its world's
    if top in sys.stdlib_module_names and not name.startswith(_STANDARD):
        return None
    if issubclass(kind, dict | list | set):
        return None if len([*_readers(owner)[1]()]) > _MAX_ELEMENTS else owner
    if not _belongs(kind.__module__, top) or kind.__name__ in _OPERATORS:
        return None
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception:  # any: a class may raise on attribute access
        return None
    return attributes if type(attributes) is dict else None


def _readers(contents: Any) -> tuple[Callable[[], Iterable[Any]], Callable[[], Iterable[Any]]]:
    """Return what reads the keys and the values of ``contents``, by the built-in types' own methods.

    Those of a subclass may do anything: Transformers' import every model.
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
