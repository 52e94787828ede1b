"""Files that kvtailor keeps: where, and how they are written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NO_CACHE = "off"


def cache_base(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for what is kept on disk: KVTAILOR_CACHE_DIR, or kvtailor in the user's cache.

    None where KVTAILOR_CACHE_DIR is "off". The folder need not exist.
    """
    named = environ.get("KVTAILOR_CACHE_DIR")
    if named == NO_CACHE:
        return None
    return Path(named or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvtailor"))


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside this one to write to, which then takes its place; after an error nothing does.

    Raises OSError.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
