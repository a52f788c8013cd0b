"""A call is made once, by whichever thread begins it."""

import threading

import pytest

from pinfeed.threads.call import Call


def test_a_call_is_finished_once() -> None:
    made: list[int] = []
    call = Call(made.append, 1)
    call.finish()
    reader = threading.Thread(target=call.run)
    reader.start()
    reader.join(30)
    call.finish()
    assert made == [1]
    assert call.done()


def test_a_thread_waits_for_a_call_that_another_one_finishes() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def work() -> str:
        has_begun.set()
        assert may_end.wait(30)
        return "result"

    call = Call(work)
    others = [threading.Thread(target=call.run) for _ in range(2)]
    for thread in others:
        thread.start()
    assert has_begun.wait(30)
    may_end.set()
    assert call.finish() == "result"
    for thread in others:
        thread.join(30)


def test_a_call_that_an_interrupt_has_cut_off_is_abandoned() -> None:
    finished = Call(lambda: 1)
    assert finished.finish() == 1
    finished.abandon(ValueError())
    assert finished.result() == 1
    of_another = Call(lambda: 2)
    of_another._takers.append(-1)
    of_another.abandon(ValueError())
    assert not of_another.done()
    cut_off = Call(lambda: 3)
    # As after an interrupt at the beginning of ``run``.
    cut_off._takers.append(threading.get_ident())
    cut_off.abandon(ValueError("cut off"))
    with pytest.raises(ValueError, match="cut off"):
        cut_off.result()
