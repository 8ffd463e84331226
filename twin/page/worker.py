"""The process that answers for one open page. A new question stops the one that it is at."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from twin.page.knobs import Choices
from twin.page.questions import Document, Inquiry, answer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.sharedctypes import Synchronized
    from types import FrameType

Answered = Callable[[int, str, Document], None]
"""Called in a thread with a question's number, the kind of answer, and the answer; kind `done` is the last."""


class Outdated(BaseException):
    """A newer question has come. Not an `Exception`, so that no handler on the way takes it for an error."""


class Worker:
    """Answers questions about one scenario, always the newest alone.

    A question that comes while an earlier one is computed stops it at once, except before its quick draft: answers then
    follow a slider that does not rest.
    """

    def __init__(self, inquiry: Inquiry, answered: Answered) -> None:
        context = multiprocessing.get_context("spawn")  # a server has threads, which a fork would not copy
        self._newest = context.Value("q", 0)
        self._connection, far_end = context.Pipe()
        # A copy without what it has computed: the process reads the scenario, and its plug-ins, itself.
        self._process = context.Process(
            target=_serve, args=(replace(inquiry), far_end, self._newest), daemon=True, name="what-if"
        )
        self._ready = False
        self._process.start()
        far_end.close()
        self._reader = threading.Thread(target=self._read, args=(answered,), daemon=True)
        self._reader.start()

    def ask(self, choices: Choices) -> int:
        """Ask a question; returns its number."""
        with self._newest.get_lock():
            self._newest.value += 1
            number = int(self._newest.value)
        self._connection.send((number, choices))
        self._stop_outdated()
        return number

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        self._process.terminate()
        self._process.join(5)
        if threading.current_thread() is not self._reader:  # it may be at a message, and ends with the process
            self._reader.join(5)
        self._connection.close()

    def _stop_outdated(self) -> None:
        pid = self._process.pid
        if self._ready and hasattr(signal, "SIGUSR1") and pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def _read(self, answered: Answered) -> None:
        while True:
            try:
                number, kind, document = self._connection.recv()
            except (EOFError, OSError):
                return
            self._ready = True  # its handler of the signal is in place
            answered(number, kind, document)


def _serve(inquiry: Inquiry, connection: Connection, newest: Synchronized[int]) -> NoReturn:
    answering = _Answering(newest)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, answering.stop_if_outdated)
    while True:
        try:
            number, choices = connection.recv()
        except (EOFError, OSError):
            sys.exit(0)
        while connection.poll():
            number, choices = connection.recv()
        answering.answer(inquiry, number, choices, connection)


class _Answering:
    """The question that is being answered, and whether it may be stopped now."""

    def __init__(self, newest: Synchronized[int]) -> None:
        self._newest = newest
        self._number = 0
        self._stoppable = False

    def stop_if_outdated(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal that a newer question has come."""
        if self._stoppable and self._number < self._newest.value:
            self._stoppable = False
            raise Outdated

    def answer(self, inquiry: Inquiry, number: int, choices: Choices, connection: Connection) -> None:
        """Answer one question, as far as it stays the newest."""
        self._number = number

        def tell(kind: str, document: Document) -> None:
            self._stoppable = False  # half a message must not be sent
            connection.send((number, kind, document))
            self._stoppable = True
            self.stop_if_outdated(0, None)

        try:
            answer(inquiry, choices, tell)
            self._stoppable = False
            connection.send((number, "done", {}))
        except Outdated:
            pass
        except Exception as error:  # the page must not wait for an answer that does not come
            self._stoppable = False
            connection.send((number, "error", {"text": f"{type(error).__name__}: {error}"}))
            traceback.print_exception(error)
        finally:
            self._stoppable = False
