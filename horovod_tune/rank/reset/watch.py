"""Finds what a trial has changed in the modules that stay: one pass over them, by identity, in some ten ms.

A *space* is what has named or listed contents: a module, a class, and the dicts, lists, sets and objects that
those hold. `Watch` compares each with what it was and puts functions, classes and removed or added attributes
back. Whatever else differs it returns: the process is then replaced.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

# Of Ray, ours and what Ray talks with: they change all the time, and no training function sets them.
UNWATCHED = {"ray", "horovod_tune", "google", "grpc", "msgpack", "psutil", "cloudpickle", "__main__"}
UNWATCHED |= {"sympy", "mpmath"}
# Tables of thousands of constants.
UNWATCHED |= {"charset_normalizer", "wcwidth", "torchgen", "_ast"}
# Containers of the standard library that programs register in or set. The others are mostly caches.
_STANDARD: tuple[str, ...] = (
    "calendar",
    "copyreg",
    "csv",
    "gettext",
    "json",
    "mimetypes",
    "shutil",
    "urllib",
)
_STANDARD += ("multiprocessing.reduction",)
# The modules with functions whose defaults, code or attributes programs change.
_WITH_FUNCTIONS = ("torch.nn", "torch.optim", "torch.utils.data", "torch.distributions", "horovod")
# What libraries note down for themselves as they work; its loss or stay is not seen by a training function.
# A name that is missing here costs new processes, not a wrong result.
OWN_NOTES = {
    *("_cupti_monitor_checked", "_SIGCHLD_handler_set", "next_id", "__warningregistry__", "__slotnames__"),
    *("_handle_map", "_distributed_opaque_types_registered", "_max_vals", "_min_vals", "cls_counter"),
    *("concrete_type_store", "_lazy_seed_tracker", "hide", "_dir", "_global_uid"),
}
_PLAIN = (str, bytes, int, float, complex, tuple, frozenset, type(None))
_NO_SPACE = (*_PLAIN, FunctionType, BuiltinFunctionType, ModuleType, property, staticmethod, classmethod)
# Thousands of them are torch's and NumPy's operators, whose attributes are caches.
_OPERATORS = ("OpOverload", "OpOverloadPacket", "ufunc", "_ArrayFunctionDispatcher", "Library", "Logger")
# From a module to what a dict in one of its objects holds.
_DEPTH = 2
_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
# Whose classes only torch itself changes; they are a third of what a fresh worker has.
_COMPILER: tuple[str, ...] = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch.testing",
)
_COMPILER += (
    "torch._refs",
    "torch._numpy",
    "torch._subclasses",
    "torch.distributed.tensor",
    "torch.utils._sympy",
)
# A container of more elements is a table of torch's or Python's own.
_MOST = 1500
_MISSING = object()


class _Space(NamedTuple):
    name: str
    owner: Any
    # None for a list or a set.
    keys: list[Any] | None
    values: list[Any]
    read: Callable[[], Iterable[Any]]

    def now(self) -> _Space:
        keys = None if self.keys is None else list(_keys(_contents_of(self.owner)))
        return self._replace(keys=keys, values=list(self.read()))

    def all(self) -> list[Any]:
        """Return the elements, keys and values."""
        elements = self.values[0] if issubclass(type(self.owner), set) else self.values
        return [*(self.keys or ()), *elements]

    def items(self) -> dict[Any, Any]:
        return dict(zip(self.keys or (), self.values, strict=False))


class Watch:
    """The contents of modules at the time when they were added, or accepted since."""

    def __init__(self) -> None:
        self._spaces: dict[int, _Space] = {}
        self._functions: dict[int, FunctionType] = {}
        self._parts: list[tuple[Any, ...]] = []
        # What imports of libraries put into spaces that were there before.
        self.registered: list[Any] = []

    def add_all(self) -> None:
        """Watch the modules that there are."""
        self.add(list(sys.modules.values()))

    def add(self, modules: Iterable[Any]) -> None:
        """Watch these modules too, as they are now."""
        for module in modules:
            if not isinstance(module, ModuleType):
                continue
            top = module.__name__.partition(".")[0]
            if top not in UNWATCHED:
                self._add(module, module.__name__, top, _DEPTH)
        self._parts += map(_PARTS, [*self._functions.values()][len(self._parts) :])

    def _add(self, owner: Any, name: str, top: str, depth: int) -> None:
        contents = _contents_of(owner, top, name)
        if id(owner) in self._spaces or contents is None:
            return
        keys = None if isinstance(contents, list | set) else list(_keys(contents))
        read = _reader(contents)
        space = self._spaces[id(owner)] = _Space(name, owner, keys, list(read()), read)
        for value in space.values:
            if type(value) is FunctionType and str(value.__module__).startswith(_WITH_FUNCTIONS):
                self._functions[id(value)] = value
        if depth == 0:
            return
        for key, value in zip(space.keys or range(len(space.values)), space.values, strict=True):
            is_pythons = isinstance(key, str) and (key.startswith("__") or key.endswith("member_map_"))
            # Not isinstance(): a proxy may raise when it is asked for its class.
            if not issubclass(type(value), _NO_SPACE) and (not is_pythons or key == "__constants__"):
                self._add(value, f"{name}.{key}", top, depth - 1)

    def forget(self, modules: Iterable[Any]) -> None:
        """Watch these modules, which are dropped, no longer; nor what they held."""
        names = {getattr(module, "__name__", "").partition(".")[0] for module in modules}
        if names:
            self._spaces = {
                number: space
                for number, space in self._spaces.items()
                if space.name.partition(".")[0] not in names
            }

    def differing(self) -> dict[int, _Space]:
        """Return the spaces whose contents are not those that are known, as they are now."""
        found = {}
        for number, space in self._spaces.items():
            with contextlib.suppress(Exception):  # any: objects are compared only if they are others
                if list(space.read()) == space.values:
                    continue
            with contextlib.suppress(RuntimeError):  # a thread of a library's changes it at this moment
                found[number] = space.now()
        return found

    def accept(self, before: dict[int, _Space]) -> None:
        """Take what has changed since ``before`` (of `differing`) as the modules' own doing."""
        for number, now in self.differing().items():
            known, earlier = self._spaces[number], before.get(number)
            if earlier is None:
                there = set(map(id, known.all()))
                self.registered += [each for each in now.all() if id(each) not in there]
                self._spaces[number] = now
            elif now.keys is not None:
                then, kept = earlier.items(), known.items()
                new = {k: v for k, v in now.items().items() if then.get(k, _MISSING) is not v}
                kept |= new
                self.registered += [*new, *new.values()]
                self._spaces[number] = known._replace(keys=list(kept), values=list(kept.values()))

    def restore(self) -> list[str]:
        """Put back what can be; return what else was changed."""
        problems = []
        earlier, self._parts = self._parts, list(map(_PARTS, self._functions.values()))
        if earlier != self._parts:
            all_three = zip(self._functions.values(), earlier, self._parts, strict=True)
            changed = [function for function, before, now in all_three if before != now]
            problems += [f"{each.__module__}.{each.__qualname__} was changed" for each in changed]
        for number, now in self.differing().items():
            known = self._spaces[number]
            if now.keys is None:
                if not _is_note(known.name):
                    problems.append(f"{known.name} was changed")
                continue
            then, current = known.items(), now.items()
            for key in {**then, **current}:
                old, new = then.get(key, _MISSING), current.get(key, _MISSING)
                if old is not new and not _restore(known.owner, key, old, new):
                    name = f"{known.name}.{key}"
                    if not _is_note(name):
                        problems.append(f"{name} was changed")
            self._spaces[number] = known.now()
        return problems


def _restore(owner: Any, key: Any, old: Any, new: Any) -> bool:
    """Put an attribute of a module or class back; return whether nothing else has to be done."""
    if not isinstance(owner, ModuleType | type):
        return _are_equal(old, new)
    if issubclass(type(new), ModuleType) and old is _MISSING and sys.modules.get(new.__name__) is new:
        return True  # a package has got one more of its modules
    is_code = callable(old) or hasattr(type(old), "__get__") or old is None
    if not is_code and old is not _MISSING:
        return _are_equal(old, new)
    try:
        if old is _MISSING:
            delattr(owner, key)
        else:
            setattr(owner, key, old)
    except Exception:  # any that a class of a library raises
        return False
    return True


def _contents_of(owner: Any, top: str = "", name: str = "") -> Any:
    """Return the dict, list or set of what ``owner`` holds; None if it is not watched."""
    kind = type(owner)
    if issubclass(kind, ModuleType):
        return vars(owner)
    if issubclass(kind, type):
        module = owner.__dict__.get("__module__")
        is_tops = isinstance(module, str) and _belongs(module, top)
        # torch.cuda.FloatTensor and some hundred like it, with hundreds of attributes each.
        is_watched = is_tops and kind.__name__ != "tensortype" and not name.startswith(_COMPILER)
        return vars(owner) if not top or is_watched else None
    if top == "horovod" or owner is sys.modules:
        return None  # Horovod's are its world's
    if top in sys.stdlib_module_names and not name.startswith(_STANDARD):
        return None
    if issubclass(kind, dict | list | set):
        return None if top and len([*_reader(owner)()]) > _MOST else owner
    if top and (not _belongs(str(kind.__module__), top) or kind.__name__ in _OPERATORS):
        return None
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception:  # any: classes decide themselves how they are asked
        return None
    return attributes if type(attributes) is dict else None


def _keys(contents: Any) -> Any:
    return dict.keys(contents) if isinstance(contents, dict) else contents.keys()


def _reader(contents: Any) -> Callable[[], Any]:
    """Return what reads ``contents`` by the built-in types' own methods.

    Those of a subclass may do anything: Transformers' import every model.
    """
    if isinstance(contents, list):
        return functools.partial(list.copy, contents)
    if isinstance(contents, set):
        return lambda: (set.copy(contents),)  # a set's order is not that of its copy
    if isinstance(contents, dict):
        return functools.partial(dict.values, contents)
    return contents.values  # type: ignore[no-any-return]  # of a class


def _belongs(module: str, top: str) -> bool:
    return module.partition(".")[0].lstrip("_") == top.lstrip("_")


def _are_equal(old: Any, new: Any) -> bool:
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # any: tensors, for example, cannot be compared like this
        return False


def _is_note(name: str) -> bool:
    return "cache" in name.lower() or not OWN_NOTES.isdisjoint(name.split("."))
