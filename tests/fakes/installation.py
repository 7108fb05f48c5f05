"""A copy of the package without compiled kernels, as after `pip install`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hps


class Installation:
    """A copy of the package, in a process of which kernels can be compiled."""

    def __init__(self, directory: Path):
        self.package = directory / "site" / "hps"
        self.temporary = directory / "tmp"
        self.temporary.mkdir(parents=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.package.parent),
            "HOME": "/dev/null",
            "TMPDIR": str(self.temporary),
        }
        shutil.copytree(Path(hps.__file__).parent, self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def start(self, program: str, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-c", program]
        environment = self.environment | environment
        return subprocess.Popen(
            command, env=environment, cwd=self.temporary, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, program: str, **environment: str) -> tuple[str, list[str]]:
        """The program's output, and the lines of its log."""
        return self.result(self.start(program, **environment))

    @staticmethod
    def result(process: subprocess.Popen) -> tuple[str, list[str]]:
        try:
            output, log = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, log
        return output, log.splitlines()

    def make_unwritable(self) -> None:
        """Nothing can be made below a file, not even by root."""
        shutil.rmtree(self.package / "__pycache__", ignore_errors=True)
        (self.package / "__pycache__").touch()
