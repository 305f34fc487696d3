"""The names of row weights. The command checks them before transformers, which takes seconds, is loaded."""

from __future__ import annotations

import re
from typing import Any

FAR = 256  # tokens, the default of "far"


def parse_row_weight(given: Any) -> tuple[str | None, int]:
    """(kind, distance) of "far", "far:TOKENS", "kl" or None."""
    found = re.fullmatch(r"(kl)|(far)(?::([1-9]\d*))?", given) if isinstance(given, str) else None
    if found is None and given is not None:
        raise ValueError(f"row_weight={given!r}: must be 'far', 'far:TOKENS' or 'kl'")
    return (None, FAR) if found is None else (found[1] or found[2], int(found[3] or FAR))
