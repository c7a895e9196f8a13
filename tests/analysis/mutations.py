"""Damage to an experiment's folder, drawn from a seed: bytes, JSON values, kinds of files, names."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any

# fmt: off
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, float("nan"), float("inf"), 2**70, 10**400, -(10**320), 9e99,
    "", [], {}, [[]], {"": {}}, {"_type": "CLOUDPICKLE_FALLBACK", "value": "80"},
    "=1+1", "\x1b[2J\x1b]0;title\x07", "<script>alert(1)</script>", "\ud800", "a\nb\tc", "\u202eabc", "$x^{$",
    "../..", "x" * 300_000, "1" * 400, "{{data}}",
)
# fmt: on


def damage(home: Path, rng: random.Random) -> str:
    """Do one thing to an experiment's folder; returns what, for the test's message."""
    files = sorted(path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        return "nothing is left to damage"
    telling = [path for path in files if path.suffix in (".json", ".pkl", ".txt")]
    path = rng.choice(telling if telling and rng.random() < 0.9 else files)
    kind = rng.choice((flip, cut, repeat, replace_values, replace_values, replace_values, other_kind, rename))
    kind(path, rng)
    return f"{kind.__name__} {path.relative_to(home)}"


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 20)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def repeat(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + rng.randrange(200))
    path.write_bytes(data[:end] + data[begin:end] * rng.randrange(1, 50) + data[end:])


def replace_values(path: Path, rng: random.Random) -> None:
    """Replace a few values of the file's JSON, also of JSON within JSON; other files get bytes flipped."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError:
        return flip(path, rng)
    lines = [_replaced(line, rng) for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return None


def _replaced(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str) and value[:1] in "{[" and rng.random() < 0.9:
        try:
            return json.dumps(_replaced(json.loads(value), rng))
        except ValueError:
            return value
    if isinstance(value, dict):
        made = {key: _replaced(inner, rng) for key, inner in value.items()}
        if made and rng.random() < 0.5:
            key = rng.choice(sorted(made))
            match rng.randrange(3):
                case 0:
                    made[key] = rng.choice(ODD)
                case 1:
                    made[str(rng.choice(ODD))] = made.pop(key)
                case 2:
                    made[key] = _deep(rng.choice((40, 41, 400)))
        return made
    if isinstance(value, list):
        made_list = [_replaced(inner, rng) for inner in value]
        if made_list and rng.random() < 0.1:
            made_list[rng.randrange(len(made_list))] = rng.choice(ODD)
        return made_list
    return rng.choice(ODD) if rng.random() < 0.02 else value


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if depth % 2 else {"d": value}
    return value


def other_kind(path: Path, rng: random.Random) -> None:
    path.unlink()
    match rng.randrange(9):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to("/etc/passwd")
        case 4:
            path.symlink_to(path)
        case 5:
            path.write_bytes(b"[" * 1_000_000)
        case 6:
            with path.open("wb") as file:
                file.truncate(2**41)
        case 7:
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case 8:
            path.write_bytes(b'{"loss": 1, "training_iteration": 1}\n' * 3 + b"\xff\xfe\xed\xa0\x80")


def rename(path: Path, rng: random.Random) -> None:
    """Give the file, or its folder, an unexpected name."""
    place = path.parent if rng.random() < 0.5 and "result" in path.name else path
    name = rng.choice(
        (b"\xff\xfe", b"a\nb\x1b[2J", b"=cmd", "\u202ex".encode(), b"checkpoint_000001.part", b" ")
    )
    target = os.path.join(os.fsencode(place.parent), name)
    if not os.path.lexists(target):
        shutil.move(os.fsencode(place), target)
