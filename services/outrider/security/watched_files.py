"""Values that are made from files, and made again when the files change: certificates, tokens, credentials."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import structlog

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

Signature = tuple[tuple[int, int, int], ...]


class UnusableFile(Exception):
    """A file cannot be used. The message names the flag, the reason, and the file unless its name may be a secret."""


class WatchedFiles(Generic[_T]):
    """Holds a value that is made from files. Safe to use from any thread.

    A new version that cannot be used, like a file that is only half written, is logged once, and the old value stays.
    """

    def __init__(self, flag: str, paths: Sequence[Path], make: Callable[[Sequence[bytes]], _T]) -> None:
        """`make` turns the files' contents into the value, and raises ValueError with a message that quotes none of
        them. Raises UnusableFile.
        """
        self._flag, self._paths, self._make = flag, tuple(paths), make
        self._lock = threading.Lock()
        try:
            self._seen = self._signature()
            self._value = self._read()
        except (OSError, ValueError) as error:
            raise UnusableFile(f"{flag}: {_reason(error)}") from None
        self._is_unusable = False
        with _watching:
            _watched.add(self)

    def is_unusable(self) -> bool:
        """Returns whether an older version is used because the files cannot be used as they are now."""
        self.current()  # checks the files: they may have changed since the value was last read
        return self._is_unusable

    def current(self) -> _T:
        """Returns the value: the same object as long as no file has changed."""
        with self._lock:
            try:
                signature = self._signature()
            except OSError as error:
                # Treated as size -1: it is logged now, and again only when something changes.
                signature = ((0, -1, error.errno or 0),)
                self._changed(signature, error)
                return self._value
            if signature != self._seen:
                # The signature is older than the contents: a file that changes between the two is read again.
                try:
                    self._value = self._read()
                    self._seen, self._is_unusable = signature, False
                    log.info("files.changed", flag=self._flag)
                except (OSError, ValueError) as error:
                    self._changed(signature, error)
            return self._value

    def _changed(self, signature: Signature, error: Exception) -> None:
        self._is_unusable = True
        if signature != self._seen:
            self._seen = signature
            log.error(
                "files.unusable", flag=self._flag, reason=_reason(error), consequence="what was read before stays"
            )

    def _signature(self) -> Signature:
        # Includes the inode: Kubernetes updates mounted secrets by moving a symbolic link to other files, whose size
        # and time may be the same.
        found = (path.stat() for path in self._paths)
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)

    def _read(self) -> _T:
        return self._make([path.read_bytes() for path in self._paths])


_watched: WeakSet[WatchedFiles[Any]] = WeakSet()
_watching = threading.Lock()


def unusable_flags() -> dict[str, bool]:
    """Returns by flag, for all watched files of this process, whether an older version is used because the files cannot
    be used as they are now."""
    # Copied under the lock, as a set must not grow during iteration; the files are checked outside of it.
    with _watching:
        watched = list(_watched)
    found: dict[str, bool] = {}
    for files in watched:
        found[files._flag] = found.get(files._flag, False) or files.is_unusable()
    return found


def _reason(error: Exception) -> str:
    # Not str(error): it has the path, and people sometimes give the secret itself in place of a path.
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
