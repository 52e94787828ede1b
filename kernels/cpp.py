"""C++ of our own, compiled when it is first called."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kvtailor.files import belongs_to_others

log = logging.getLogger(__name__)


def source(*names: str) -> str:
    """The texts of files of this folder, one after the other."""
    return "".join(Path(__file__).with_name(name).read_text() for name in names)


def load_cpp(text: str, what: str, *flags: str) -> Any:
    """The compiled source; None where that cannot be had, said in the log as "what: why".

    flags: of the compiler, without their first dash.
    """
    # All that is used of Inductor here: its way to the C++ compiler, and its cache.
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        folder = Path(cache_dir())
        if belongs_to_others(folder):
            raise PermissionError(f"{folder}, where it would lie, belongs to somebody else")
        return CppCodeCache.load(text, extra_flags=tuple(f"-{flag}" for flag in flags))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        log.warning("%s: %s: %s", what, type(error).__name__, first)
        return None
