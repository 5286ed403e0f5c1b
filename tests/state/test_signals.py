"""Handlers wait while state is written, and run afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from monograph.state.signals import held_back, interruptible


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[str]]:
    found: list[str] = []

    def note(_number: int, _frame: object) -> None:
        found.append("handled")

    before = signal.signal(signal.SIGUSR1, note)
    yield found
    assert signal.signal(signal.SIGUSR1, before) is note
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_waits_for_the_end_and_runs_once(seen: list[str]) -> None:
    with held_back():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        seen.append("written")
    assert seen == ["written", "handled"]


def test_an_interrupt_comes_after_what_is_inside(seen: list[str]) -> None:
    def write() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            seen.append("written")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert seen == ["written", "handled"]


def test_it_comes_at_once_until_signals_are_held_back(seen: list[str]) -> None:
    def write() -> None:
        with interruptible() as hold:
            try:
                signal.raise_signal(signal.SIGINT)
                seen.append("never")
            except BaseException:
                hold.on = True
                signal.raise_signal(signal.SIGINT)
                seen.append("undone")
                raise

    with pytest.raises(KeyboardInterrupt):
        write()
    assert seen == ["undone"]


def test_one_inside_another_waits_for_the_end_of_both(seen: list[str]) -> None:
    with held_back():
        with held_back():
            signal.raise_signal(signal.SIGUSR1)
        seen.append("written")
    assert seen == ["written", "handled"]


def test_another_thread_holds_nothing_back(seen: list[str]) -> None:
    inside, out = threading.Event(), threading.Event()

    def work() -> None:
        with held_back():
            inside.set()
            out.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    signal.raise_signal(signal.SIGUSR1)
    out.set()
    thread.join()
    assert seen == ["handled"]
