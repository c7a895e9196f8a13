"""Detects changes that a trial made to modules that remain loaded for the next one, in 10 to 30 ms.

CPython until 3.12 counts the changes of each dict (PEP 509), so that most dicts need not be compared.

A *container* is a module, a class, or one of the dicts, lists, sets and objects in them. `Watch`
compares the keys and values of each with a snapshot. In modules and classes it restores replaced functions,
classes and Nones, and deletes added attributes. What libraries record for themselves is ignored. Any other
difference is returned, and the process is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

# This package and what it uses change all the time. The last six are tables of thousands of constants.
_UNWATCHED = {"horovod_tune", "google", "grpc", "msgpack"}
_UNWATCHED |= {"sympy", "mpmath", "charset_normalizer", "wcwidth", "torchgen", "_ast"}
# Of these, only functions and classes are watched, since everything else changes all the time.
_ONLY_CALLABLES = {"ray", "psutil", "cloudpickle"}
# torch's compiler, a fourth of a new worker's modules: only the packages and their settings are watched.
_COMPILER_SETTINGS = ("config", "eval_frame", "backends.registry")
_COMPILER = tuple(
    f"torch.{name}."
    for name in (
        *("_dynamo", "_inductor", "_functorch", "_higher_order_ops", "_subclasses", "_refs", "_numpy"),
        *("_decomp", "testing", "distributed.tensor", "utils._sympy"),
    )
)
# Modules of the standard library whose containers are bookkeeping and caches, or which `settings` restores.
_UNWATCHED_STANDARD = (
    *("_warnings", "asyncio", "concurrent", "functools", "importlib", "inspect", "linecache", "os", "posix"),
    *("multiprocessing.process", "multiprocessing.resource_tracker", "multiprocessing.util", "random"),
    *("signal", "subprocess", "sys", "threading", "typing", "warnings", "weakref"),
)
# Modules in which programs change the code or attributes of functions. Defaults are watched in all modules.
_WITH_FUNCTIONS = ("torch.nn", "torch.optim", "torch.utils.data", "torch.distributions", "horovod")
# What libraries record for themselves, which training functions do not notice. A name that is missing here
# costs new processes, not wrong results.
_BOOKKEEPING = {
    *("_cupti_monitor_checked", "_SIGCHLD_handler_set", "next_id", "_system_limits_checked", "__slotnames__"),
    *("_handle_map", "_distributed_opaque_types_registered", "_max_vals", "_min_vals", "cls_counter"),
    *("concrete_type_store", "_lazy_seed_tracker", "hide", "_dir", "_global_uid"),
    "_DEVICE_CONTEXTS",  # torch_xla's, of a rank's device
    # torch's registry of operators that were called, its counters of fake tensors, and FSDP2's classes.
    *("singleton", "DESCRIBER_NEXT_ID", "simple_call_counter", "cls_to_fsdp_cls", "_builtin_table"),
    "GenerationTracker",  # of torch's compiler, which torch_xla imports
    "_handlerList",  # of logging
    "_CAN_RECORD_REGISTRY",  # Transformers': classes of models
    "rcParamsDefault",  # matplotlib's, with the backend
}
# The same for CUDA (a context, its generators), for operators that are registered at their first use, for
# tempfile's random names, for functions whose default group `torch_dist` drops, and for the class for local
# files that fsspec imports at its first use (by PyTorch Lightning).
_BOOKKEEPING_PREFIXES = (
    *("torch.cuda.", "torch.library._defs.triton::", "torch.library._impls.triton/"),
    *("torch._TritonLibrary.", "tempfile._name_sequence."),
    *("torch.distributed.nn.functional.", "torch.distributed.optim.zero_redundancy_optimizer."),
    *(f"fsspec.registry.{name}file" for name in ("", "registry.", "_registry.")),
    # What pyarrow (for pandas' read_parquet), Pillow, matplotlib and OmegaConf set up at their first use.
    *("pyarrow.pandas_compat._", "pyarrow._dataset._dataset_pq", "PIL.Image._initialized"),
    *("matplotlib.pyplot._REPL_DISPLAYHOOK", "omegaconf._utils.OmegaConfDumper."),
)
# Dicts that are cleared if they were empty at first: that of a closure (a cache, as in scipy.linalg), and one
# that all objects of one of Accelerate's state classes share.
_CLEARED = (".__closure__", "_shared_state")
# What functions remember of their calls: results, and which warnings were shown.
_OF_CALLS = re.compile(
    r"cache|memoize|_warned|warnings_shown|warningregistry|nohandlerwarning", re.IGNORECASE
)
_LEAF_TYPES = (
    *(str, bytes, int, float, complex, tuple, frozenset, type(None), property, staticmethod),
    *(classmethod, BuiltinFunctionType, ModuleType),
)
# Types with thousands of objects (torch's and NumPy's operators), whose attributes are caches.
_OPERATOR_TYPES = ("OpOverload", "OpOverloadPacket", "ufunc", "_ArrayFunctionDispatcher", "Library", "Logger")
_FUNCTION_TYPES = (FunctionType, functools._lru_cache_wrapper)
# How deep to follow references from a module: to the contents of a dict in one of its objects.
_DEPTH = 2
# A larger container is assumed to be a constant table. That of torch's operators has 1800 elements.
_MAX_ELEMENTS = 4000
_MISSING = object()


# Where CPython counts the changes of a dict: after the fields of every object and the number of elements.
_COUNTER_OFFSET = 24
_NO_COUNTER = ctypes.c_uint64()
_UNKNOWN = -1  # no count: the contents are compared

# In C, since there are thousands of functions.
_read_parts = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")


def _parts_of(function: FunctionType) -> tuple[Any, ...]:
    *parts, attributes = _read_parts(function)
    return *parts, dict(attributes)


class _Container(NamedTuple):
    name: str
    owner: Any
    contents: Any  # a mapping, list or set
    counter: ctypes.c_uint64  # where CPython counts the changes of the contents
    changes: int  # their number at the snapshot
    items: Any  # the snapshot: a dict, list or set

    def now(self) -> _Container:
        changes = self.counter.value if self.counter is not _NO_COUNTER else _UNKNOWN
        return self._replace(changes=changes, items=_items(self.contents))  # in this order, for other threads

    def by_key(self) -> Iterable[tuple[Any, Any]]:
        """Return the snapshot's values with their keys, indices or, in a set, themselves."""
        if isinstance(self.items, set):
            return ((each, each) for each in self.items)
        return self.items.items() if isinstance(self.items, dict) else enumerate(self.items)

    def has_changed(self) -> bool:
        try:
            return _items(self.contents) != self.items
        except Exception:  # any: comparing may raise; what is still the same object is not compared
            return True


_read_counter, _read_changes = operator.attrgetter("counter.value"), operator.attrgetter("changes")


class Watch:
    """The contents of modules when they were added, with changes that were accepted since."""

    def __init__(self) -> None:
        # By the id of the owner.
        self._containers: dict[int, _Container] = {}
        self._parts: dict[FunctionType, tuple[Any, ...]] = {}
        # By package: what clears its functions' caches and restores the variables of its closures.
        self._restores: dict[str, list[Callable[[], Any]]] = {}
        # What imports of libraries have put into containers of other modules.
        self.registered: list[Any] = []

    def add(self, modules: Iterable[Any]) -> None:
        """Watch these modules too, with their present contents."""
        for module in modules:
            name = module.__name__ if isinstance(module, ModuleType) else ""
            if (
                name
                and not name.startswith("ray.data.")
                and top_level(name) not in _UNWATCHED
                and (not name.startswith(_COMPILER) or name.endswith(_COMPILER_SETTINGS))
            ):
                self._add(module, name, top_level(name), _DEPTH)

    def add_functions(self, modules: Iterable[Any]) -> None:
        """Watch also what these modules' functions keep between calls: caches, and variables of closures."""
        for module in modules:
            package = top_level(module.__name__) if isinstance(module, ModuleType) else ""
            if not package or package in _UNWATCHED:
                continue
            members = list(vars(module).values())
            for each in members[:]:
                if issubclass(type(each), type) and _belongs(each.__dict__.get("__module__"), package):
                    members += vars(each).values()
            seen = set[int]()
            while members:
                member = members.pop()
                if type(member) in (staticmethod, classmethod):
                    member = member.__func__
                if type(member) not in _FUNCTION_TYPES or id(member) in seen:
                    continue
                seen.add(id(member))
                if not _belongs(member.__module__, package):
                    continue
                if type(member) is not FunctionType:
                    members.append(member.__wrapped__)
                    # Of another one, the module may hold what is in it.
                    if member.cache_info().currsize == 0:
                        self._restores.setdefault(package, []).append(member.cache_clear)
                    continue
                for cell in member.__closure__ or ():
                    try:
                        value = cell.cell_contents
                    except ValueError:  # it is empty
                        continue
                    members.append(value)
                    restore = functools.partial(setattr, cell, "cell_contents", value)
                    self._restores.setdefault(package, []).append(restore)
                    if not issubclass(type(value), _LEAF_TYPES):
                        name = f"{module.__name__}.{member.__qualname__}.__closure__"
                        self._add(value, name, package, depth=0)

    def _add(self, owner: Any, name: str, package: str, depth: int) -> None:
        contents = None if id(owner) in self._containers else _contents_of(owner, package, name)
        if contents is None:
            return
        if type(contents) is MappingProxyType:
            (contents,) = gc.get_referents(contents)
        container = _Container(name, owner, contents, _counter_of(contents), _UNKNOWN, ()).now()
        self._containers[id(owner)] = container
        if contents is owner:  # a subclass of dict, list or set may have attributes too
            self._add(_attributes_of(owner, package), name, package, depth)
        for key, value in container.by_key():
            if type(value) is FunctionType:
                for registry in vars(value).values():
                    if type(registry) is MappingProxyType:  # of functools.singledispatch
                        self._add(registry, f"{name}.{key}.registry", package, depth=0)
                has_defaults = value.__defaults__ or value.__kwdefaults__
                if has_defaults or str(value.__module__).startswith(_WITH_FUNCTIONS):
                    self._parts[value] = _parts_of(value)
                    if value.__kwdefaults__:
                        self._add(value.__kwdefaults__, f"{name}.{key}.__kwdefaults__", package, depth=0)
            # Not isinstance(), since a proxy's `__class__` may raise.
            elif depth and not issubclass(type(value), _LEAF_TYPES):
                internal = isinstance(key, str) and (key.startswith("__") or key.endswith("member_map_"))
                if not internal or key == "__constants__":
                    self._add(value, f"{name}.{key}", package, depth - 1)

    def forget(self, packages: Collection[str]) -> None:
        """Stop watching the modules of these packages, which were removed."""
        if packages:
            containers = list(self._containers.items())
            for number in [number for number, each in containers if top_level(each.name) in packages]:
                del self._containers[number]
            for function in [each for each in self._parts if top_level(str(each.__module__)) in packages]:
                del self._parts[function]
            for package in packages:
                self._restores.pop(package, None)

    def differing(self) -> dict[int, _Container]:
        """Return the containers whose contents have changed, with their present contents."""
        found = {}
        containers = list(self._containers.values())  # another thread may import meanwhile
        have_changes = map(operator.ne, map(_read_counter, containers), map(_read_changes, containers))
        for container in itertools.compress(containers, have_changes):
            if container.has_changed():
                with contextlib.suppress(RuntimeError):  # a library's thread changes it meanwhile
                    found[id(container.owner)] = container.now()
        return found

    def accept(self, before: dict[int, _Container]) -> None:
        """Accept changes since ``before``, which `differing` returned before an import."""
        for number, now in self.differing().items():
            known = self._containers[number]
            then = dict(before.get(number, known).by_key())
            new = {key: value for key, value in now.by_key() if then.get(key, _MISSING) is not value}
            self.registered += [*new, *new.values()]
            items = now.items
            if number in before:
                merged = dict(known.by_key()) | new
                items = merged if isinstance(items, dict) else type(items)(merged.values())
            self._containers[number] = known._replace(changes=_UNKNOWN, items=items)

    def restore(self) -> list[str]:
        """Restore what can be restored; return the other changes."""
        for restore in itertools.chain.from_iterable(self._restores.values()):
            restore()
        changed = []
        # First in C, since few ever change.
        if not _are_equal(list(map(_read_parts, self._parts)), list(self._parts.values())):
            changed = [each for each, then in self._parts.items() if not _are_equal(then, _read_parts(each))]
        names = (f"{each.__module__}.{each.__qualname__}" for each in changed)
        problems = [name for name in names if not _is_bookkeeping(name)]
        self._parts |= zip(changed, map(_parts_of, changed), strict=True)
        for number, now in self.differing().items():
            known = self._containers[number]
            then, current = dict(known.by_key()), dict(now.by_key())
            if not then and isinstance(known.owner, dict) and known.name.endswith(_CLEARED):
                known.owner.clear()
                self._containers[number] = known.now()
                continue
            for key in then | current:
                old, new = then.get(key, _MISSING), current.get(key, _MISSING)
                if top_level(known.name) in _ONLY_CALLABLES and not (callable(old) and callable(new)):
                    continue
                name = f"{known.name}.{key}"
                if old is _MISSING and type(new) is BuiltinFunctionType and _is_bookkeeping(name):
                    continue  # added by C code at its first use: torch.cuda._get_device_properties
                if old is not new and not _restore(known.owner, key, old, new) and not _is_bookkeeping(name):
                    problems.append(name)
            self._containers[number] = known.now()
        return [f"{name} was changed" for name in problems]


def _restore(owner: Any, key: Any, old: Any, new: Any) -> bool:
    """Restore an attribute of a module or class; return True if nothing remains to be done."""
    if issubclass(type(new), ModuleType) and old is _MISSING and sys.modules.get(new.__name__) is new:
        return True  # an imported submodule, or a dict of modules that are imported when they are needed
    if not isinstance(owner, ModuleType | type):
        return _are_equal(old, new)
    try:
        if old is _MISSING:
            delattr(owner, key)
        elif callable(old) or hasattr(type(old), "__get__") or old is None or _are_equal(old, new):
            setattr(owner, key, old)  # also instead of an equal value: the old object is watched
        else:
            return False
    except Exception:  # any that a class of a library raises
        return False
    return True


def _are_equal(old: Any, new: Any) -> bool:
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # any: tensors, for example, cannot be compared like this
        return False


def _is_bookkeeping(name: str) -> bool:
    is_known = name.startswith(_BOOKKEEPING_PREFIXES) or not _BOOKKEEPING.isdisjoint(name.split("."))
    return is_known or _OF_CALLS.search(name) is not None


def _contents_of(owner: Any, package: str, name: str) -> Any:
    """Return the contents of ``owner`` as a mapping, list or set; None if they are not watched."""
    kind = type(owner)
    if issubclass(kind, ModuleType):
        return vars(owner)
    if issubclass(kind, type):
        # Dozens of types like torch.cuda.FloatTensor have hundreds of attributes each.
        is_own = _belongs(owner.__dict__.get("__module__"), package) and kind.__name__ != "tensortype"
        return vars(owner) if is_own else None
    if issubclass(kind, MappingProxyType):
        return owner
    # Horovod's objects belong to its world.
    if package == "horovod" or package in _ONLY_CALLABLES or owner is sys.modules:
        return None
    if package in sys.stdlib_module_names and name.startswith(_UNWATCHED_STANDARD):
        return None
    if issubclass(kind, dict | list | set):
        return None if len(_items(owner)) > _MAX_ELEMENTS else owner
    return _attributes_of(owner, package)


def _attributes_of(owner: Any, package: str) -> dict[str, Any] | None:
    kind = type(owner)
    if not _belongs(kind.__module__, package) or kind.__name__ in _OPERATOR_TYPES:
        return None
    attributes = read_attribute(owner, "__dict__")
    return attributes if type(attributes) is dict else None


def _counter_of(contents: Any) -> ctypes.c_uint64:
    """Return CPython's counter of the changes of a dict; for other contents, `_NO_COUNTER`."""
    if not _HAS_COUNTERS or not isinstance(contents, dict):
        return _NO_COUNTER
    return ctypes.c_uint64.from_address(id(contents) + _COUNTER_OFFSET)


def _has_counters() -> bool:
    probe: Any = type("", (), {})()  # some releases count all changes but those of an object's attributes
    counter = ctypes.c_uint64.from_address(id(vars(probe)) + _COUNTER_OFFSET)
    counts = [counter.value]
    for number in (1, 2):
        probe.key = number
        counts.append(counter.value)
    del probe.key
    return len({*counts, counter.value}) == 4


_HAS_COUNTERS = _has_counters()


def _items(contents: Any) -> Any:
    """Return a copy of a mapping, list or set."""
    # By the built-in types' methods: a subclass's may do anything (Transformers' import every model), and
    # dict.copy() and set.copy() call some of them.
    if isinstance(contents, list):
        return list.copy(contents)
    if isinstance(contents, set):
        return set().union(contents)
    if type(contents) is dict:
        return contents.copy()
    return dict(dict.items(contents) if isinstance(contents, dict) else contents.items())


def _belongs(module: Any, package: str) -> bool:
    return isinstance(module, str) and top_level(module).lstrip("_") == package.lstrip("_")


def top_level(name: str) -> str:
    return name.partition(".")[0]


def read_attribute(value: Any, name: str) -> Any:
    """Return an attribute without running code of the value's class; None if there is none."""
    kind = type if issubclass(type(value), type) else object
    try:
        return kind.__getattribute__(value, name)
    except Exception:  # any: a descriptor may raise
        return None
