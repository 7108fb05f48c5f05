import asyncio
import tracemalloc
import zlib

import pytest

from hps.service.held_memory import HeldMemory
from hps.service.http_answer import RequestError
from hps.service.lookup_threads import LookupThreads
from hps.service.request_body import BodyReader


def test_no_more_than_the_limit_is_decompressed():
    body = zlib.compress(bytes(64 << 20))
    memory = HeldMemory(1 << 20)
    threads = LookupThreads(1, 10, memory)
    reader = BodyReader(100_000, 10, threads, memory)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="decompresses to more"):
            asyncio.run(reader.decompress({b"content-encoding": b"deflate"}, body))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
        threads.close(10)
