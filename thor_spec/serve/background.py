"""A call that may take long, made beside the launcher's loop, which must keep looking after the job."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T], *, name: str) -> "Future[T]":
    """Start ``function`` in a thread that nobody waits for; its error is raised with the answer."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001  # raised again where the answer is read
            answer.set_exception(error)
        else:
            answer.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
