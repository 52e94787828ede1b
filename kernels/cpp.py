"""C++ of our own, compiled when it is first called."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def load_cpp(source: str, what: str, *flags: str) -> Any:
    """The compiled source; None where that cannot be had, said in the log as "what: why".

    flags: of the compiler, without their first dash.
    """
    # All that is used of Inductor here: its way to the C++ compiler, and its cache.
    from torch._inductor.codecache import CppCodeCache

    try:
        return CppCodeCache.load(source, extra_flags=tuple(f"-{flag}" for flag in flags))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        log.warning("%s: %s: %s", what, type(error).__name__, first)
        return None
