"""Signals that ask for the end: counted, and harmless from the first one to the end of the process."""

import os
import signal
import subprocess
import sys

import pytest

from thor_spec.serve.stop_requests import SIGNALS, StopRequests

ENDING = """
import time
from thor_spec.serve.stop_requests import StopRequests
with StopRequests() as stop:
    print("begun", flush=True)
    while not stop.any:
        time.sleep(0.01)
print("behind", flush=True)
time.sleep(0.3)
"""


@pytest.mark.parametrize("first", SIGNALS)
def test_row13_more_signals_change_nothing_to_the_end_of_the_process(first: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "begun\n"
    process.send_signal(first)
    assert process.stdout.readline() == "behind\n"
    while process.poll() is None:
        for more in SIGNALS:
            process.send_signal(more)
    assert process.returncode == 0
    process.stdout.close()


def test_without_a_signal_the_handlers_are_what_they_were() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with StopRequests() as stop:
        stop.ask()
    assert stop.any
    assert not stop.signalled
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_a_signal_is_counted_again_in_the_next_block() -> None:
    for _ in range(2):
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.urgent()
