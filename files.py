"""Files that kvtailor keeps and writes: where, by whom they may be written, and how.

What it keeps for itself lies in a folder of its own and is never reached through a link. What a
user names is written as a shell would: through links, into devices and pipes.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

NO_CACHE = "off"

# Parts of files begin and end so; seconds after which their writer is taken for dead.
_PART = ".kvtailor-", ".tmp"
_ABANDONED = 3600.0


def cache_base(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for what is kept on disk: KVTAILOR_CACHE_DIR, or kvtailor in the user's cache.

    None where KVTAILOR_CACHE_DIR is "off", or the user has no home. The folder need not exist.
    """
    named = environ.get("KVTAILOR_CACHE_DIR")
    if named == NO_CACHE:
        return None
    if named or environ.get("XDG_CACHE_HOME"):
        return Path(named or Path(environ["XDG_CACHE_HOME"], "kvtailor"))
    try:
        return Path.home() / ".cache" / "kvtailor"
    except RuntimeError as error:
        no_cache(str(error))
        return None


@functools.cache
def no_cache(why: str) -> None:
    """Say so in the log, once per reason."""
    log.warning("no cache: %s", why)


def belongs_to_others(folder: Path, group: bool = False) -> bool:
    """Whether somebody else owns the folder, or anyone (group: or its group) may write to it.

    Raises OSError.
    """
    status = folder.stat()
    writable = status.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if group else 0))
    return os.name == "posix" and (status.st_uid != os.getuid() or writable != 0)


def read_kept(path: Path, most: int) -> str:
    """The text of a regular file of at most so many bytes that is no link. Raises OSError,
    ValueError for text that is no UTF-8."""
    # Opening a device or a pipe may do something, or wait for ever.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path.name} is no regular file")
    flags = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
    wanted = functools.reduce(int.__or__, (getattr(os, name, 0) for name in flags), os.O_RDONLY)
    with open(os.open(path, wanted), "rb") as file:
        status = os.fstat(file.fileno())
        data = file.read(most + 1) if stat.S_ISREG(status.st_mode) else None
    if data is None or len(data) > most:
        raise OSError(f"{path.name} must be a file of at most {most} bytes")
    return data.decode()


@contextmanager
def written_whole(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside this one to write to, which then takes its place, whatever stands
    there; after an error nothing does. mode: permissions, before the umask.

    Raises OSError.
    """
    start, end = _PART
    part = path.with_name(f"{start}{secrets.token_hex(8)}{end}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def clear_parts(folder: Path) -> None:
    """Delete what killed writers left in a folder of our own."""
    start, end = _PART
    for part in folder.glob(f"{start}*{end}"):
        with suppress(OSError):
            if time.time() - part.lstat().st_mtime > _ABANDONED:
                part.unlink()


def why_not_written(path: str | Path) -> str | None:
    """What ``write_named`` would miss there, as far as can be seen before; None for nothing."""
    target = os.path.realpath(path)
    if not str(path) or os.path.isdir(target):
        return f"a file that can be written, got {str(path) or 'an empty name'}"
    folder = os.path.dirname(target)
    if os.path.exists(path):
        # A regular file is replaced by one beside it, anything else is opened.
        regular = os.path.isfile(target)
        allowed = os.access(path, os.W_OK) and (not regular or os.access(folder, os.W_OK))
    else:
        if not os.path.isdir(folder):
            return f"a folder that exists, got {path}"
        allowed = os.access(folder, os.W_OK)
    return None if allowed else f"a file that can be written, got {path}"


def write_named(path: str | Path, text: str) -> None:
    """Write a file that the user named: whole or not at all, links followed, permissions kept.

    What is no regular file is written into and stays what it is. Raises OSError.
    """
    data = text.encode("utf-8", "replace")
    try:
        status = os.stat(path)
    except FileNotFoundError:
        status = None
    if status is not None and _is_stdout(status):
        sys.stdout.write(data.decode())
    elif status is not None and not stat.S_ISREG(status.st_mode):
        with open(path, "wb") as file:
            file.write(data)
    elif status is not None and not os.access(path, os.W_OK):
        raise PermissionError(13, os.strerror(13), str(path))
    else:
        with written_whole(Path(os.path.realpath(path))) as part:
            part.write_bytes(data)
            if status is not None:
                part.chmod(stat.S_IMODE(status.st_mode))


def _is_stdout(status: os.stat_result) -> bool:
    """Whether this is where print writes to, which a second writer would overwrite."""
    try:
        return os.path.samestat(status, os.fstat(1))
    except OSError:
        return False
