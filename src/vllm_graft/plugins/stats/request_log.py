"""``request-log``: one line of JSON per finished request, written off the event loop."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, ClassVar, Final

from vllm_graft.contracts import BatchRecord, ConfigError, OptionError, OptionValue, RequestRecord, StatSink

_EVERY_S: Final = 0.2
_NAME: Final = "request-log"


def _room(value: OptionValue) -> int:
    if isinstance(value, int) and value >= 1:
        return value
    raise OptionError(f"must be at least 1, but is {value!r}", option="queue", item=_NAME, fix="raise it")


class RequestLog(StatSink):
    """Appends every finished request to a file of JSON lines.

    Options: ``path``, the file (``{pid}`` becomes the process id, so that several API servers write several files),
    which is made for its owner alone;
    ``queue``, how many requests may wait to be written. When the disk is slower than the server and the queue is full,
    requests are left out; the file's last line then says how many.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {"path": "requests-{pid}.jsonl", "queue": 10_000}

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse a queue without room and a path with NUL; the folder may exist only on the machine that serves."""
        _room(options["queue"])
        if "\0" in str(options["path"]):
            raise OptionError("must have no NUL character", option="path", item=_NAME, fix="remove it")
        if not options["path"]:
            raise OptionError("must not be empty", option="path", item=_NAME, fix="name a file")

    @classmethod
    def check_machine(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse a path that is a folder, a FIFO or a socket, or whose folder is missing or cannot be written."""
        path = Path(str(options["path"])).absolute()
        if path.is_dir():
            raise OptionError("names a folder", option="path", item=_NAME, fix="name a file in it")
        if path.is_fifo() or path.is_socket():
            raise OptionError("names a FIFO or a socket", option="path", item=_NAME, fix="name a file")
        folder = path.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            what = f"names a file in {folder}, " + (
                "which cannot be written" if folder.exists() else "which is missing"
            )
            raise OptionError(what, option="path", item=_NAME, fix="make the folder where the server will run")

    def __init__(self, options: Mapping[str, OptionValue] | None = None) -> None:
        super().__init__(options)
        self._path = Path(str(self.option("path")).replace("{pid}", str(os.getpid()))).absolute()
        self._file = _open(self._path)
        self._room = _room(self.option("queue"))
        self._waiting: deque[RequestRecord] = deque()
        self._closing = threading.Event()
        self._dropped = 0
        self._error: Exception | None = None
        # A thread of its own, although each sink has one in a server: with LLM a sink is called in the caller's thread.
        self._writer = threading.Thread(target=self._write, name="graft-request-log", daemon=True)
        self._writer.start()

    def finished(self, requests: Sequence[RequestRecord], batch: BatchRecord) -> None:
        """Leave finished requests for the writer; what stopped the writer is raised here, where it is noticed."""
        if self._error is not None:
            raise self._error
        # Appending wakes no thread: a hand-over to another one would cost more than the budget.
        for request in requests:
            if len(self._waiting) < self._room:
                self._waiting.append(request)
            else:
                self._dropped += 1

    def close(self) -> None:
        """Write what waits, and how many were left out."""
        self._closing.set()
        self._writer.join(timeout=5)

    def _write(self) -> None:
        try:
            while not self._closing.wait(_EVERY_S):
                self._write_waiting()
            self._write_waiting()
            if self._dropped:
                self._file.write(json.dumps({"dropped": self._dropped}) + "\n")
            self._file.close()
        except (OSError, ConfigError) as error:
            self._error = error

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        if not self._is_in_place():
            self._file.close()
            self._file = _open(self._path)
        while self._waiting:
            self._file.write(json.dumps(asdict(self._waiting.popleft())) + "\n")
        self._file.flush()

    def _is_in_place(self) -> bool:
        """Return whether the open file has its name; not after it was rotated or removed, when nobody would read it."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _open(path: Path) -> IO[str]:
    """Open the file to append to; one that is not there is made for its owner alone.

    Nothing waits here: a FIFO would hold up the start until it has a reader, and requests after that.
    """
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _no_file(path) from error
        raise ConfigError(
            f"the file {path} cannot be written: {error}",
            where="option path of request-log",
            fix="name a file in a folder that this user may write",
        ) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):
        os.close(descriptor)
        raise _no_file(path)
    # Only the opening must not wait; a disk may.
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "a", encoding="utf-8")


def _no_file(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a FIFO or a socket, which would hold the server up whenever it has no reader",
        where="option path of request-log",
        fix="name a file",
    )
