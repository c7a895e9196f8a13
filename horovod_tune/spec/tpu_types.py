"""TPU slice types by their names in Cloud TPU and Ray (`v4-32`): their hosts, and the chips per host."""

from __future__ import annotations

import re

from horovod_tune.errors import SpecError

# By generation. The number in a type's name counts cores, not chips.
_CORES_OF_A_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5litepod": 1, "v5p": 2, "v6e": 1, "v7x": 2}
# Generations whose hosts have up to 8 chips if one host is the whole slice; otherwise a host has 4.
_UP_TO_8_CHIPS = ("v5litepod", "v6e")


def shape_of(tpu_type: object) -> tuple[int, int]:
    """Return how many hosts a slice of this type has, and how many chips each host has.

    The rules are those of Ray 2.60 (`ray._private.accelerators.tpu`) and of Cloud TPU's documentation.

    Raises:
        SpecError: there is no such type.

    >>> shape_of("v4-32"), shape_of("v5litepod-8"), shape_of("v5litepod-16"), shape_of("v3-8")
    ((4, 4), (1, 8), (4, 4), (1, 4))
    """
    match = re.fullmatch(r"(v\w+?)-([1-9]\d*)", tpu_type) if isinstance(tpu_type, str) else None
    generation, cores = match.groups() if match else ("", "0")
    cores_of_a_chip = _CORES_OF_A_CHIP.get(generation)
    if cores_of_a_chip is None or int(cores) % cores_of_a_chip:
        raise SpecError(
            "tpu_type must be a slice's type as Ray and Cloud TPU name it, GENERATION-CORES with one of "
            f"{', '.join(_CORES_OF_A_CHIP)} (v5e is v5litepod there), such as 'v4-32', got {tpu_type!r}"
        )
    chips = int(cores) // cores_of_a_chip
    if chips <= 4 or (generation in _UP_TO_8_CHIPS and chips <= 8):
        return 1, chips
    if chips % 4:
        raise SpecError(f"tpu_type {tpu_type!r} would have {chips} chips, not a multiple of a host's 4")
    return chips // 4, 4
