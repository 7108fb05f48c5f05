import asyncio
import gc
import threading
import weakref

import pytest

from hps.service.call_threads import CallThreads
from hps.service.held_memory import HeldMemory
from hps.service.http_answer import RequestError
from hps.testing.waiting import PATIENCE_S, wait_until_async


@pytest.fixture
def release():
    """Ends the calls that wait for it."""
    return threading.Event()


@pytest.fixture
def run():
    """Run a coroutine function with its own threads, which must end."""
    made = []

    def run(main, threads=2, timeout_s=PATIENCE_S, max_waiting=100):
        made.append(CallThreads(threads, timeout_s, HeldMemory(1 << 20), max_waiting, "lookup"))
        return asyncio.run(main(made[-1]))

    yield run
    for threads in made:
        assert threads.close(PATIENCE_S)


async def idle(threads):
    """Wait until no call runs or waits."""
    await wait_until_async(lambda: not threads.pending, "no call runs or waits")


def test_a_call_runs_on_another_thread_and_its_result_comes_back(run):
    async def main(threads):
        return await threads.run(lambda a, b: (a + b, threading.get_ident()), 1, 2)

    result, ident = run(main)
    assert result == 3
    assert ident != threading.get_ident()


def test_many_calls_each_get_their_own_result(run):
    async def main(threads):
        results = []
        for _ in range(50):
            results += await asyncio.gather(*(threads.run(pow, base, 2) for base in range(60)))
        return results

    assert run(main, threads=3) == [base * base for base in range(60)] * 50


def _raises_generator_exit():
    raise GeneratorExit


def test_what_a_call_raises_is_raised_where_it_is_awaited(run):
    async def main(threads):
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        with pytest.raises(GeneratorExit):  # no Exception
            await threads.run(_raises_generator_exit)
        return await threads.run(lambda: "alive")

    assert run(main, threads=1) == "alive"


def test_calls_behind_a_long_call_get_other_threads(run, release):
    async def main(threads):
        long = [asyncio.ensure_future(threads.run(release.wait, PATIENCE_S)) for _ in range(3)]
        short = [await threads.run(lambda: "short") for _ in range(3)]
        release.set()
        return short, await asyncio.gather(*long)

    assert run(main, threads=4) == (["short"] * 3, [True] * 3)


def test_calls_handed_over_together_run_at_once_when_they_are_long(run):
    together = threading.Barrier(4)

    async def main(threads):
        return await asyncio.gather(*(threads.run(together.wait, PATIENCE_S) for _ in range(4)))

    assert sorted(run(main, threads=4)) == [0, 1, 2, 3]


def test_a_result_does_not_wait_for_a_later_long_call_of_the_same_thread(run, release):
    async def main(threads):
        short = asyncio.ensure_future(threads.run(lambda: "short"))
        await asyncio.sleep(0)  # it is handed over first
        long = asyncio.ensure_future(threads.run(release.wait, PATIENCE_S))
        first = await short  # the only thread is now in the long call, and had no moment to tell
        release.set()
        return first, await long

    assert run(main, threads=1) == ("short", True)


def test_more_calls_than_may_wait_are_refused(run, release):
    async def main(threads):
        accepted = [asyncio.ensure_future(threads.run(release.wait, PATIENCE_S)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="3 lookups run or wait, expected at most 3"):
            await threads.run(lambda: None)
        assert threads.pending == 3
        release.set()
        await asyncio.gather(*accepted)
        assert threads.pending == 0
        return await threads.run(lambda: "again")

    assert run(main, threads=1, max_waiting=2) == "again"


def test_a_call_that_takes_too_long_is_given_up_and_still_counts_until_it_ends(run, release):
    async def main(threads):
        with pytest.raises(RequestError, match=r"within 0.1 s \(service.request_timeout_s\)"):
            await threads.run(release.wait, PATIENCE_S)
        assert threads.pending == 1
        release.set()
        await idle(threads)

    run(main, threads=1, timeout_s=0.1)


def test_a_call_that_timed_out_while_it_waited_never_starts(run, release):
    started = []

    async def main(threads):
        long = asyncio.ensure_future(threads.run(release.wait, PATIENCE_S))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="did not end within"):
            await threads.run(started.append, 1)
        release.set()
        with pytest.raises(RequestError, match="did not end within"):
            await long
        await idle(threads)

    run(main, threads=1, timeout_s=0.05)
    assert started == []


def test_a_cancelled_request_leaves_nothing_behind(run, release):
    async def main(threads):
        began = threading.Event()
        task = asyncio.ensure_future(threads.run(lambda: (began.set(), release.wait(PATIENCE_S))))
        await asyncio.to_thread(began.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        await idle(threads)
        return await threads.run(lambda: "alive")

    assert run(main, threads=1) == "alive"


class Buffer:
    """Stands for the body of a request."""


def _fails(buffer):
    raise ValueError


def _fails_from_another(buffer):
    try:
        raise KeyError
    except KeyError as error:
        raise ValueError from error


@pytest.mark.parametrize("call", [_fails, _fails_from_another, lambda buffer: next(iter(()))])
def test_an_error_keeps_its_request_until_it_is_handled_and_no_longer(run, call):
    async def main(threads):
        buffer = Buffer()
        alive = weakref.ref(buffer)
        try:
            await threads.run(call, buffer)
        except (ValueError, RuntimeError):
            del buffer
        await wait_until_async(lambda: not alive(), "this turn of the event loop, and the thread's, have ended")

    gc.disable()
    try:
        run(main, threads=1)
    finally:
        gc.enable()


def test_a_call_that_timed_out_while_it_waited_lets_go_of_its_request(run, release):
    async def main(threads):
        running = threading.Barrier(4)
        long = [
            asyncio.ensure_future(threads.run(lambda: (running.wait(PATIENCE_S), release.wait(PATIENCE_S)))) for _ in range(3)
        ]
        await asyncio.to_thread(running.wait, PATIENCE_S)
        buffer = Buffer()
        alive = weakref.ref(buffer)
        threads._memory.held = 7
        try:
            await threads.run(len, buffer, held=7)
        except RequestError:
            del buffer
        await wait_until_async(lambda: threads.pending == 3, "the call that waited is given up")
        assert threads._memory.held == 0
        await wait_until_async(lambda: not alive(), "its request is forgotten")
        release.set()
        await asyncio.gather(*long, return_exceptions=True)

    gc.disable()
    try:
        run(main, threads=3, timeout_s=0.1)
    finally:
        gc.enable()


def test_what_a_call_holds_after_its_timeout_counts_until_it_ends(run, release):
    async def main(threads):
        for _ in range(2):
            release.clear()
            threads._memory.held = 7
            with pytest.raises(RequestError, match="did not end within"):
                await threads.run(release.wait, PATIENCE_S, held=7)
            assert threads._memory.held == 7
            release.set()
            await idle(threads)
            assert threads._memory.held == 0

    run(main, threads=1, timeout_s=0.1)


def test_a_new_timeout_holds_for_later_calls(run, release):
    async def main(threads):
        for timeout_s in (0.03, 0.02, 0.01):
            threads.limit_to(timeout_s)
            with pytest.raises(RequestError, match=f"within {timeout_s} s"):
                await threads.run(release.wait, PATIENCE_S)
            release.set()
            await idle(threads)
            release.clear()

    run(main, threads=2)


def test_a_refused_call_gives_its_memory_back(run, release):
    async def main(threads):
        long = asyncio.ensure_future(threads.run(release.wait, PATIENCE_S))
        await asyncio.sleep(0)
        threads._memory.held = 7
        with pytest.raises(RequestError, match="expected at most 1"):
            await threads.run(len, "", held=7)
        assert threads._memory.held == 0
        release.set()
        await long

    run(main, threads=1, max_waiting=0)


def test_idle_threads_hold_neither_arguments_nor_results(run):
    async def main(threads):
        buffers = [Buffer() for _ in range(8)]
        await asyncio.gather(*(threads.run(lambda buffer: buffer, buffer) for buffer in buffers))
        alive = weakref.WeakSet(buffers)
        buffers.clear()
        await wait_until_async(lambda: gc.collect() >= 0 and not alive, "nothing refers to them")

    run(main, threads=2)


def test_close_lets_waiting_calls_end_and_says_when_it_could_not(release):
    done = []

    async def main(threads):
        calls = [
            asyncio.ensure_future(threads.run(release.wait, PATIENCE_S)),
            asyncio.ensure_future(threads.run(done.append, 1)),
        ]
        await wait_until_async(lambda: threads.pending == 2, "both are handed over")
        assert not await asyncio.to_thread(threads.close, 0.01)
        release.set()
        assert await asyncio.to_thread(threads.close, PATIENCE_S)
        await asyncio.gather(*calls)

    threads = CallThreads(1, PATIENCE_S, HeldMemory(1 << 20), 10, "lookup")
    asyncio.run(main(threads))
    assert done == [1]


def test_a_result_after_the_event_loop_ended_is_dropped(release):
    async def main(threads):
        asyncio.ensure_future(threads.run(release.wait, PATIENCE_S)).cancel()
        await asyncio.sleep(0)

    threads = CallThreads(1, PATIENCE_S, HeldMemory(1 << 20), 10, "lookup")
    asyncio.run(main(threads))
    release.set()
    assert threads.close(PATIENCE_S)
