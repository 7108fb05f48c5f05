"""Calls on threads: their results and errors, and what they hold while they run, wait, or are given up."""

import asyncio
import gc
import threading
import weakref
from contextlib import asynccontextmanager

import pytest

from hps.serve.engine.call_threads import CallThreads
from hps.serve.http.http_answer import RequestError
from hps.serve.http.memory_budget import MemoryBudget
from hps.testing.waiting import PATIENCE_S, wait_until_async
from tests.servers.on_loop import beside


@asynccontextmanager
async def calls(_, threads=2, timeout_s=PATIENCE_S, max_waiting=100):
    """Threads, which must end, and what ends the calls that wait for it."""
    made = CallThreads(threads, timeout_s, MemoryBudget(1 << 20), max_waiting, "lookup")
    yield made, threading.Event()
    assert await asyncio.to_thread(made.close, PATIENCE_S)


async def begun(threads, release, count=1):
    """Hand over calls that run until the release."""
    found = [asyncio.ensure_future(threads.run(release.wait, PATIENCE_S)) for _ in range(count)]
    await asyncio.sleep(0)
    return found


async def idle(threads):
    await wait_until_async(lambda: not threads.pending, "no call runs or waits")


@beside(calls)
async def test_a_call_runs_on_another_thread_and_its_result_comes_back(threads, release, /):
    result, ident = await threads.run(lambda a, b: (a + b, threading.get_ident()), 1, 2)
    assert result == 3
    assert ident != threading.get_ident()


@beside(calls, threads=3)
async def test_many_calls_each_get_their_own_result(threads, release, /):
    for _ in range(50):
        assert await asyncio.gather(*(threads.run(pow, base, 2) for base in range(60))) == [base * base for base in range(60)]


def _raises_generator_exit():
    raise GeneratorExit


@beside(calls, threads=1)
async def test_what_a_call_raises_is_raised_where_it_is_awaited(threads, release, /):
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    with pytest.raises(GeneratorExit):  # no Exception
        await threads.run(_raises_generator_exit)
    assert await threads.run(lambda: "alive") == "alive"


@beside(calls, threads=4)
async def test_calls_behind_long_calls_get_other_threads(threads, release, /):
    long = await begun(threads, release, 3)
    assert [await threads.run(lambda: "short") for _ in range(3)] == ["short"] * 3
    release.set()
    assert await asyncio.gather(*long) == [True] * 3
    together = threading.Barrier(4)  # handed over together, they run at once
    assert sorted(await asyncio.gather(*(threads.run(together.wait, PATIENCE_S) for _ in range(4)))) == [0, 1, 2, 3]


@beside(calls, threads=1)
async def test_a_result_does_not_wait_for_a_later_long_call_of_the_same_thread(threads, release, /):
    short = asyncio.ensure_future(threads.run(lambda: "short"))
    await asyncio.sleep(0)  # it is handed over first
    (long,) = await begun(threads, release)
    assert await short == "short"  # the only thread is now in the long call, and had no moment to tell
    release.set()
    assert await long


@beside(calls, threads=1, max_waiting=2)
async def test_more_calls_than_may_wait_are_refused_and_give_their_memory_back(threads, release, /):
    accepted = await begun(threads, release, 3)
    threads._memory.used = 7
    with pytest.raises(RequestError, match="3 lookups run or wait, expected at most 3"):
        await threads.run(len, "", held=7)
    assert (threads.pending, threads._memory.used) == (3, 0)
    release.set()
    await asyncio.gather(*accepted)
    assert threads.pending == 0
    assert await threads.run(lambda: "again") == "again"


@beside(calls, threads=1, timeout_s=0.1)
async def test_what_a_call_holds_after_its_timeout_counts_until_it_ends(threads, release, /):
    for _ in range(2):
        release.clear()
        threads._memory.used = 7
        with pytest.raises(RequestError, match=r"within 0.1 s \(service.request_timeout_s\)"):
            await threads.run(release.wait, PATIENCE_S, held=7)
        assert (threads.pending, threads._memory.used) == (1, 7)
        release.set()
        await idle(threads)
        assert threads._memory.used == 0


@beside(calls)
async def test_a_new_timeout_holds_for_later_calls(threads, release, /):
    for timeout_s in (0.03, 0.02, 0.01):
        threads.limit_to(timeout_s)
        with pytest.raises(RequestError, match=f"within {timeout_s} s"):
            await threads.run(release.wait, PATIENCE_S)
        release.set()
        await idle(threads)
        release.clear()


@beside(calls, threads=1)
async def test_a_cancelled_request_leaves_nothing_behind(threads, release, /):
    began = threading.Event()
    task = asyncio.ensure_future(threads.run(lambda: (began.set(), release.wait(PATIENCE_S))))
    await asyncio.to_thread(began.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    await idle(threads)
    assert await threads.run(lambda: "alive") == "alive"


class Buffer:
    """Stands for the body of a request."""


@pytest.fixture
def no_collection():
    """What is freed is freed because nothing refers to it."""
    gc.disable()
    yield
    gc.enable()


def _fails(buffer):
    raise ValueError


def _fails_from_another(buffer):
    try:
        raise KeyError
    except KeyError as error:
        raise ValueError from error


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("call", [_fails, _fails_from_another, lambda buffer: next(iter(()))])
@beside(calls, threads=1)
async def test_an_error_keeps_its_request_until_it_is_handled_and_no_longer(threads, release, /, call):
    buffer = Buffer()
    alive = weakref.ref(buffer)
    try:
        await threads.run(call, buffer)
    except (ValueError, RuntimeError):
        del buffer
    await wait_until_async(lambda: not alive(), "this turn of the event loop, and the thread's, have ended")


@pytest.mark.usefixtures("no_collection")
@beside(calls, threads=3, timeout_s=0.1)
async def test_a_call_that_timed_out_while_it_waited_never_starts_and_lets_go_of_its_request(threads, release, /):
    running, started = threading.Barrier(4), []
    wait = lambda: (running.wait(PATIENCE_S), release.wait(PATIENCE_S))  # noqa: E731
    long = [asyncio.ensure_future(threads.run(wait)) for _ in range(3)]
    await asyncio.to_thread(running.wait, PATIENCE_S)
    buffer = Buffer()
    alive = weakref.ref(buffer)
    threads._memory.used = 7
    try:
        await threads.run(lambda buffer: started.append(1), buffer, held=7)
    except RequestError:
        del buffer
    await wait_until_async(lambda: threads.pending == 3, "the call that waited is given up")
    assert threads._memory.used == 0
    await wait_until_async(lambda: not alive(), "its request is forgotten")
    release.set()
    await asyncio.gather(*long, return_exceptions=True)
    await idle(threads)
    assert started == []


@beside(calls)
async def test_idle_threads_hold_neither_arguments_nor_results(threads, release, /):
    buffers = [Buffer() for _ in range(8)]
    await asyncio.gather(*(threads.run(lambda buffer: buffer, buffer) for buffer in buffers))
    alive = weakref.WeakSet(buffers)
    buffers.clear()
    await wait_until_async(lambda: gc.collect() >= 0 and not alive, "nothing refers to them")


@beside(calls, threads=1)
async def test_close_lets_waiting_calls_end_and_says_when_it_could_not(threads, release, /):
    done = []
    (long,) = await begun(threads, release)
    waits = asyncio.ensure_future(threads.run(done.append, 1))
    await wait_until_async(lambda: threads.pending == 2, "both are handed over")
    assert not await asyncio.to_thread(threads.close, 0.01)
    release.set()
    assert await asyncio.to_thread(threads.close, PATIENCE_S)
    await asyncio.gather(long, waits)
    assert done == [1]


def test_a_result_after_the_event_loop_ended_is_dropped():
    threads, release = CallThreads(1, PATIENCE_S, MemoryBudget(1 << 20), 10, "lookup"), threading.Event()

    async def main():
        (call,) = await begun(threads, release)
        call.cancel()
        await asyncio.sleep(0)

    asyncio.run(main())
    release.set()
    assert threads.close(PATIENCE_S)
