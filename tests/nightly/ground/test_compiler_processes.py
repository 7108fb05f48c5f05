"""Two programs that compile the same kernels at the same time."""

from tests.ring2.ground.test_compiler_processes import ALL, files, installation, program, run

__all__ = ["installation"]


def test_two_programs_that_compile_at_once_agree(installation):
    both = [installation.start(program()), installation.start(program())]
    for process in both:
        _, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
    assert files(installation) == ALL
    assert run(installation)[0] == 0
