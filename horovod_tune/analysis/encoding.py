"""What a stream writes for characters that its encoding lacks. Needs only the standard library."""

from __future__ import annotations

import codecs

# The name of this way: `stream.reconfigure(errors=OTHER_SIGNS)`.
OTHER_SIGNS = "horovod_tune.other_signs"
# Instead of the signs in our text, each of one character.
_ASCII = str.maketrans("▁▂▃▄▅▆▇█·…─", "_.,-=+*#.~-")


def _other_signs(error: UnicodeError) -> tuple[str, int]:
    r"""Return another sign for each of ours, and the code of any other character.

    >>> "▁▂█ · é".encode("ascii", OTHER_SIGNS)
    b'_.# . \\xe9'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error(OTHER_SIGNS, _other_signs)
