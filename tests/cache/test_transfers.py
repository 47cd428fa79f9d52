import threading
import time

import pytest

from dasc.cache import InlineMover, ThreadMover, TransferError
from tests.cache.fakes import FakeStorage, state_of


def test_inline_packs_are_done_on_return_and_keep_their_error_for_the_ticket():
    storage = FakeStorage(2, 2)
    storage.native[1] = state_of([1, 2])
    mover = InlineMover(storage)
    mover.pack(1, 2).result()
    assert storage.compressed[2] == state_of([1, 2])
    storage.fail = {"pack"}
    ticket = mover.pack(1, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half-way"):
            ticket.result()


def test_thread_packs_run_in_order_in_the_background():
    storage = FakeStorage(2, 4)
    gate, order = threading.Event(), []

    def wait(operation):
        gate.wait(10)
        order.append(threading.current_thread())

    storage.before = wait
    storage.native[1] = state_of([1])
    mover = ThreadMover(storage)
    tickets = [mover.pack(1, slot) for slot in (1, 2, 3)]
    assert not any(ticket.done() for ticket in tickets)
    gate.set()
    for ticket in tickets:
        ticket.result()
    assert len(set(order)) == 1
    assert order[0] is not threading.current_thread()
    mover.close()


def test_a_worker_told_to_exit_fails_its_pack_and_not_its_caller():
    storage = FakeStorage(1, 1)

    def exit_worker(operation):
        raise SystemExit(3)

    storage.before = exit_worker
    mover = ThreadMover(storage)
    with pytest.raises(TransferError, match="worker stopped"):
        mover.pack(1, 1).result()
    mover.close()


def test_closing_fails_what_has_not_begun_and_refuses_what_comes_after():
    storage = FakeStorage(1, 2)
    gate = threading.Event()
    storage.before = lambda operation: gate.wait(10)
    mover = ThreadMover(storage)
    running, waiting = mover.pack(1, 1), mover.pack(1, 2)
    threading.Thread(target=lambda: (time.sleep(0.05), gate.set())).start()
    mover.close()
    running.result()
    with pytest.raises(Exception):  # noqa: B017, PT011 - concurrent.futures' own cancellation
        waiting.result()
    with pytest.raises(RuntimeError):
        mover.pack(1, 1)
