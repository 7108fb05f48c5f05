import numpy as np
import pytest

from hps.service.answer_memory import AnswerMemory

LIMIT = 4096  # a fourth of it is kept


def address(memory):
    return memory.ctypes.data


@pytest.fixture
def answers():
    return AnswerMemory(LIMIT)


def test_memory_is_used_again_when_nobody_refers_to_it(answers):
    first = answers.take(600)
    place = address(first)
    del first
    assert [address(answers.take(size)) for size in (600, 500, 300)] == [place] * 3


VIEWS = {
    "array": lambda memory: memory,
    "part": lambda memory: memory[100:200],
    "vectors": lambda memory: np.ndarray((10, 2), np.float32, memory, 16),
    "view": lambda memory: memory[:400].view(np.float32)[3:].reshape(-1, 1),
    "buffer": lambda memory: memory.data,
    "part of a buffer": lambda memory: memoryview(memory)[5:6],
    "what a transport keeps": lambda memory: [memoryview(memory.data)],
}


@pytest.mark.parametrize("refer", VIEWS.values(), ids=VIEWS)
def test_memory_that_anything_refers_to_is_lent_to_nobody_else(answers, refer):
    memory = answers.take(500)
    place, kept = address(memory), refer(memory)
    del memory
    others = [answers.take(500) for _ in range(3)]
    assert not any(place - 500 < address(other) < place + 500 for other in others)
    assert len({address(other) for other in others}) == 3
    del kept, others
    assert place in {address(memory) for memory in [answers.take(500), answers.take(500)]}


def test_a_block_is_at_most_twice_as_large_as_what_is_asked_for(answers):
    large = answers.take(900)
    assert large.size == 900
    del large
    assert answers.take(400).base.size == 400
    assert answers.take(450).size == 450


def kept_bytes(answers):
    return sum(block.size for block in answers._blocks)


def test_what_is_kept_is_bounded_and_idle_blocks_make_room(answers):
    lent = [answers.take(400) for _ in range(5)]
    assert kept_bytes(answers) == 800
    answers.take(1000)  # there is no room, and nothing idle
    assert kept_bytes(answers) == 800
    del lent
    answers.take(1000)
    assert kept_bytes(answers) == 1000
    answers.take(1025)  # would never fit, and sends nothing away
    assert kept_bytes(answers) == 1000


def test_memory_may_be_written(answers):
    memory = answers.take(300)
    memory[...] = 7
    assert memory.flags.writeable
    assert bytes(memory.data) == b"\7" * 300
