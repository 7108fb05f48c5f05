"""Scripts that end without `close`, often: before they were ended well, most of them were aborted."""

from tests.ring2.serve import test_exit


def test_scripts_without_close_end_as_they_say(tmp_path, children):
    test_exit.test_a_script_without_close_ends_as_it_says(10, tmp_path, children)
