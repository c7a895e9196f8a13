"""What is kept of a log that grows too long."""

from __future__ import annotations

import random
import re

from horovod_tune.files import log_files

MARKER = re.compile(rb"\[horovod_tune: (\d+) bytes of this log are left out here\]\n")


def test_a_log_that_fits_is_kept_whole(tmp_path):
    path = tmp_path / "new" / "rank_0.log"
    for number in range(10):
        assert not log_files.append(path, b"line %d\n" % number, limit=80)
    assert path.read_bytes() == b"".join(b"line %d\n" % number for number in range(10))


def test_a_long_log_keeps_its_beginning_and_its_end_and_says_how_much_is_missing(tmp_path):
    """Pieces of any size, lines of any length, many cuts: what is there and what is missing add up."""
    for seed in range(60):
        dice = random.Random(seed)
        path = tmp_path / f"{seed}.log"
        limit, written = dice.choice([8_000, 20_000]), b""
        for _ in range(dice.randrange(2, 90)):
            piece = b"".join(
                b"%d %s\n" % (dice.getrandbits(30), b"x" * dice.choice([0, 3, 40, 900]))
                for _ in range(dice.randrange(0, 40))
            )
            written += piece
            log_files.append(path, piece, limit=limit)
            kept = path.read_bytes()
            assert len(kept) <= limit
            if len(written) <= limit:
                assert kept == written
                continue
            (count,) = MARKER.findall(kept)
            head, _, tail = MARKER.split(kept)
            assert written.startswith(head) and written.endswith(tail)
            assert len(head) + int(count) + len(tail) == len(written)
            assert min(len(head), len(tail)) >= limit // 4 - 920, "a quarter each, but for a line that is cut"


def test_one_endless_line_is_cut_too(tmp_path):
    path = tmp_path / "rank_0.log"
    for _ in range(50):
        log_files.append(path, b"." * 100, limit=1000)
    log_files.append(path, b"the end", limit=1000)
    kept = path.read_bytes()
    assert len(kept) <= 1000 and kept.startswith(b"....") and kept.endswith(b"the end")
    assert len(MARKER.findall(kept)) == 1
