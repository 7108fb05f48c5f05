"""Runs services of a compose file as local processes, for where there is no container engine.

What the file and the Dockerfile say is taken as it stands: profiles, order and conditions, entrypoints, commands,
environment, ports, volumes, health checks, stop signals. A container's own address becomes a loopback address of its own, so
that ports stay the same; its paths become directories of the test; both are replaced in commands and mounted files. Where
this process may, services have a read-only root file system and no capabilities, as the compose file demands.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.child_processes import own_signals
from tests.servers.compose_file import Compose, seconds
from tests.servers.redis_server import server_program

_WITHOUT_CAPABILITIES = ("setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--pdeathsig", "KILL")


class Stack:
    """The services of a compose file as processes. A context manager that ends them all.

    Args:
        compose: the file.
        directory: an empty one, for volumes and the like.
        seed: copied into the volume that is mounted at `/var/lib/hps`, when that is made.
    """

    def __init__(self, compose: Compose, directory: Path, seed: Path | None = None) -> None:
        self.compose = compose
        self.directory = directory
        self._seed = seed
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        network = f"127.{16 + os.getpid() % 200}.{time.monotonic_ns() // 1000 % 250}"
        self.addresses = {name: f"{network}.{10 + index}" for index, name in enumerate(compose.document["services"])}
        self.names = dict(self.addresses)
        for name, service in compose.services.items():
            networks = service.get("networks")
            for settings in networks.values() if isinstance(networks, dict) else ():
                self.names.update(dict.fromkeys(settings.get("aliases", ()), self.addresses[name]))
        self._stand_ins = directory / "bin"
        self._stand_ins.mkdir(parents=True)
        _lay_out_redis(self._stand_ins)

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(self._processes):
            self.kill(name)

    def up(self) -> None:
        """Start everything in the order of the file, each service when what it waits for is so far."""
        for name in self.compose.order():
            self.start(name)
        for name in self.compose.services:
            if not self._check(name).get("disable"):
                self.wait_healthy(name)

    def start(self, name: str) -> None:
        """Start a service once its conditions hold."""
        for other, condition in self.compose.needs(name).items():
            if condition == "service_completed_successfully":
                self.wait_completed(other)
            elif condition == "service_healthy":
                self.wait_healthy(other)
        self._lay_out(name)
        argv = self._argv(name)
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                isolated(argv, self.directory) if self.compose.services[name].get("read_only") else argv,
                env=self._environment(name),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=own_signals,
            )

    def bring_back(self, name: str) -> None:
        """Start a service and wait until it is healthy."""
        self.start(name)
        self.wait_healthy(name)

    def stop(self, name: str) -> int:
        """Stop as `docker compose stop` does; fails where the service does not end within its grace period."""
        service = self.compose.services[name]
        process = self._processes[name]
        process.send_signal(getattr(signal, service.get("stop_signal", "SIGTERM")))
        return process.wait(seconds(service.get("stop_grace_period", "10s")))

    def kill(self, name: str) -> None:
        """kill -9, with the processes that it started."""
        process = self._processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def wait_completed(self, name: str) -> None:
        """Wait until a one-shot service has ended well."""
        assert self._processes[name].wait(PATIENCE_S) == 0, self.log(name)

    def wait_healthy(self, name: str) -> None:
        """Run the health check of a service until it succeeds."""
        check = self._check(name)
        kind, *test = check["test"]
        argv = ["sh", "-c", *test] if kind == "CMD-SHELL" else test
        command = [self.translate(name, one) for one in argv]
        how = {"env": self._environment(name), "cwd": self.directory, "capture_output": True, "timeout": 30}

        def healthy() -> bool:
            assert self.running(name), f"{name} ended:\n{self.log(name)}"
            return subprocess.run(command, check=False, **how).returncode == 0  # type: ignore[call-overload]

        wait_until(healthy, f"{name} is healthy")

    def url(self, name: str, port: int = 8000) -> str:
        """Where a port of a container answers HTTP here."""
        return f"http://{self.addresses[name]}:{port}"

    def volume(self, name: str) -> Path:
        """Where a volume is here."""
        return self.directory / "volumes" / name

    def running(self, name: str) -> bool:
        """Whether a service has been started and has not ended."""
        return name in self._processes and self._processes[name].poll() is None

    def full_log(self, name: str) -> str:
        """What a service has written since its first start."""
        return self._log(name).read_text(errors="replace")

    def log(self, name: str) -> str:
        """The last that a service has written."""
        return self.full_log(name)[-4000:]

    def translate(self, name: str, text: str) -> str:
        """Put a text of a container into the terms of this machine: paths, its own address, those of others."""
        paths = self._paths(name)
        hosts = "|".join(map(re.escape, sorted(self.names, key=len, reverse=True)))
        fixed = {
            settings["ipv4_address"]: self.addresses[other]
            for other, service in self.compose.services.items()
            if isinstance(service.get("networks"), dict)
            for settings in service["networks"].values()
        }
        places = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True)) or "(?!)"
        addresses = "|".join(map(re.escape, fixed)) or "(?!)"
        own = self.addresses[name]
        pattern = rf"(?<![\w./-])(?P<path>{places})(?![\w.-])|(?<![\w./-])(?P<host>{hosts})(?=:\d)"
        pattern += rf"|(?P<own>\b(?:0\.0\.0\.0|127\.0\.0\.1)\b)|(?P<fixed>{addresses})(?!\d)"

        def replace(found: re.Match[str]) -> str:
            if found["path"]:
                return str(paths[found["path"]])
            return own if found["own"] else fixed[found["fixed"]] if found["fixed"] else self.names[found["host"]]

        return re.sub(pattern, replace, text)

    def _argv(self, name: str) -> list[str]:
        service, stage = self.compose.services[name], self.compose.stage(name)
        entrypoint = service.get("entrypoint", stage.entrypoint)
        default = stage.command if "entrypoint" not in service else []
        return [self.translate(name, one) for one in (*entrypoint, *service.get("command", default))]

    def _environment(self, name: str) -> dict[str, str]:
        variables = self.compose.stage(name).environment | self.compose.services[name].get("environment", {})
        # Programs come from this machine: the virtual environment of the tests stands in for the image's.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{self._stand_ins}"
        return {key: self.translate(name, str(value)) for key, value in variables.items()} | {"PATH": path}

    def _paths(self, name: str) -> dict[str, Path]:
        service = self.compose.services[name]
        paths = {one.partition(":")[0]: self._inside(name, one.partition(":")[0]) for one in service.get("tmpfs", ())}
        for one in service.get("volumes", ()):
            source, target, *_ = one.split(":")
            paths[target] = self._inside(name, target) if "/" in source else self.volume(source)
        return paths

    def _inside(self, name: str, path: str) -> Path:
        return self.directory / "containers" / name / path.strip("/").replace("/", "_")

    def _lay_out(self, name: str) -> None:
        """Empty tmpfs, new volumes, and mounted files in the terms of this machine."""
        service = self.compose.services[name]
        for one in service.get("tmpfs", ()):
            path = self._inside(name, one.partition(":")[0])
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        for one in service.get("volumes", ()):
            source, target, *_ = one.split(":")
            if "/" in source:
                path = self._inside(name, target)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self.translate(name, (self.compose.directory / source).read_text()))
            elif not self.volume(source).exists():
                if target == "/var/lib/hps" and self._seed:
                    shutil.copytree(self._seed, self.volume(source))
                self.volume(source).mkdir(parents=True, exist_ok=True)

    def _check(self, name: str) -> dict[str, Any]:
        return self.compose.services[name].get("healthcheck") or self.compose.stage(name).healthcheck or {"disable": True}

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


def isolated(argv: list[str], writable: Path) -> list[str]:
    """The command with everything but `writable` read-only and without capabilities, where this process can do that."""
    return _unshared([*_WITHOUT_CAPABILITIES, "--", *argv], writable) if can_isolate() else argv


def as_pod(argv: list[str], writable: Path, user: int) -> list[str]:
    """The command as the first process of a pod: of a user without capabilities, with process numbers of its own.

    Everything but `writable` is read-only where this process, which must be root, can do that; elsewhere what is root's is.
    """
    restricted = [*_WITHOUT_CAPABILITIES, "--reuid", str(user), "--regid", str(user), "--clear-groups", "--", *argv]
    return _unshared(restricted, writable, "--pid", "--fork", "--kill-child") if can_isolate() else restricted


def _unshared(argv: list[str], writable: Path, *more: str) -> list[str]:
    points = sorted({_mount_point(Path(one)) for one in ("/", __file__, sys.prefix, sys.base_prefix)})
    mounts = [f"mount -o remount,bind,ro {shlex.quote(point)}" for point in points]
    script = f'mount --bind "$0" "$0" && {" && ".join(mounts)} && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", *more, "sh", "-c", script, str(writable), *argv]


def can_isolate() -> bool:
    """Whether processes can have a view of their own on the file system; root alone can make one."""
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    probe = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "mount -o remount,bind,ro /"]
    return subprocess.run(probe, capture_output=True, check=False, timeout=10).returncode == 0


def _mount_point(path: Path) -> str:
    """The mount that a path is on."""
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return str(path)


def _lay_out_redis(directory: Path) -> None:
    """Where the PATH has no Redis: the server that the other tests use, and our own client."""
    if not shutil.which("redis-server"):
        (directory / "redis-server").symlink_to(str(server_program()))
    if not shutil.which("redis-cli"):
        client = directory / "redis-cli"
        client.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {Path(__file__).with_name("redis_cli.py")} "$@"\n')
        client.chmod(0o755)
