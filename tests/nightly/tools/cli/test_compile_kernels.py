"""`hps compile` in an image writes the same code whenever the image is built."""

import json

from tests.fakes.installation import Installation
from tests.ring1.tools.cli.test_compile_kernels import CONFIG
from tests.ring2.tools.cli.test_compile_kernels import SERVED, run


def test_one_process_with_one_hash_seed_writes_the_same_code_anywhere(tmp_path):
    def code(name):
        installation = Installation(tmp_path / name)
        (tmp_path / name / "ps.json").write_text(json.dumps(CONFIG))
        done = run(installation, "ps.json", "--processes", "1", PYTHONHASHSEED="0")
        assert " in 1 process, " in done.stderr
        return {path.name: path.read_bytes() for path in installation.package.glob("__pycache__/hps-kernels-*/*.code")}

    first = code("one")
    assert len(first) == SERVED
    assert first == code("another place")
    assert not [name for name, content in first.items() if b" at 0x" in content]
