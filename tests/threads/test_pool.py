"""ThreadPool: order, results, errors, and who ends the threads."""

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from pinfeed.errors import ClosedError
from pinfeed.threads.call import Call
from pinfeed.threads.pool import ThreadPool


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_calls_begin_in_order_and_give_what_the_function_gives() -> None:
    begun: list[int] = []
    with ThreadPool(1, "order") as pool:
        calls = [pool.submit(lambda i: begun.append(i) or i * i, i) for i in range(50)]
        assert [call.result() for call in calls] == [i * i for i in range(50)]
        assert all(call.done() and call.exception() is None for call in calls)
        assert list(pool.map(str, range(3))) == ["0", "1", "2"]
    assert begun == list(range(50))
    assert not threads_of("order")


def test_an_error_is_raised_as_often_as_it_is_asked_for() -> None:
    with ThreadPool(2, "error") as pool:
        call = pool.submit(lambda: {}["x"])
        for _ in range(2):
            with pytest.raises(KeyError, match="x"):
                call.result()
        assert isinstance(call.exception(), KeyError)


def test_an_error_keeps_neither_the_call_nor_its_arguments() -> None:
    class Argument:
        pass

    def fail(argument: Argument) -> None:
        del argument
        raise ValueError

    argument = Argument()
    gone = weakref.ref(argument)
    gc.disable()
    try:
        call = Call(fail, argument)
        del argument
        call.run()
        with pytest.raises(ValueError):
            call.result()
        assert gone() is None
    finally:
        gc.enable()


def test_several_threads_wait_for_one_call() -> None:
    go_on = threading.Event()
    with ThreadPool(1, "one") as pool, ThreadPool(4, "many") as others:
        call = pool.submit(go_on.wait)
        results = [others.submit(call.result) for _ in range(4)]
        go_on.set()
        assert [result.result() for result in results] == [True] * 4


def test_shutdown_makes_the_calls_that_wait_or_cancels_them() -> None:
    for cancel in (False, True):
        go_on, made = threading.Event(), []
        pool = ThreadPool(1, "shutdown")
        pool.submit(go_on.wait)
        waiting = [pool.submit(made.append, i) for i in range(3)]
        pool.shutdown(wait=False, cancel_futures=cancel)
        go_on.set()
        pool.shutdown()
        assert made == ([] if cancel else [0, 1, 2])
        for call in waiting if cancel else []:
            with pytest.raises(CancelledError):
                call.result()
        with pytest.raises(ClosedError, match="the threads of its loops have ended"):
            pool.submit(int)
        assert not threads_of("shutdown")


def test_a_pool_that_is_dropped_ends_its_threads() -> None:
    pool = ThreadPool(2, "dropped")
    threads, call = threads_of("dropped"), pool.submit(int)
    assert len(threads) == 2
    del pool
    assert call.result() == 0
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_calls_of_an_unprepared_thread_have_its_error() -> None:
    def prepare() -> None:
        raise OSError("no device")

    with ThreadPool(2, "prepared", prepare) as pool:
        for _ in range(3):
            with pytest.raises(OSError, match="no device"):
                pool.submit(int).result()
