"""The node of one test: state directories, a path of executables, namespaces."""

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tests.conformance.subject import Subject
from tests.plugins import CHECKOUT, install_delegate
from tests.printed import Printed
from tests.waiting import PATIENCE

CNI_BIN = Path(os.environ.get("PODFABRIC_TEST_BIN", CHECKOUT / "build/cni/bin")).absolute()

Config = Mapping[str, Any] | bytes


@dataclass(frozen=True)
class Outcome(Printed):
    """The answer of one process."""

    exit_code: int
    stdout: bytes
    stderr: str

    @property
    def addresses(self) -> list[str]:
        """The addresses of a result of 0.3.0 or later."""
        return [ip["address"] for ip in self.document["ips"]]


class Options(TypedDict, total=False):
    """How to start a process."""

    stdin: int | None
    stdout: int | None
    cwd: Path | None
    umask: int
    preexec_fn: Callable[[], object] | None
    through: Sequence[str]


@dataclass
class Node:
    """State and run directories are below `root`, executables in `path`.

    Other projects' IPAM plugins are in `delegates`; `policy` of config.yaml may allow them.
    """

    root: Path
    path: tuple[Path, ...]
    surroundings: Mapping[str, str] = field(default_factory=dict)
    through_agent: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def delegates(self) -> Path:
        """The CNI directory of the installation."""
        return self.root / "delegates"

    def allow(self, **policy: object) -> None:
        """Write these rules into the node's configuration."""
        etc = self.root / "etc"
        etc.mkdir(exist_ok=True)
        (etc / "config.yaml").write_text(json.dumps({"policy": policy}))

    def environ(self, **changes: str | None) -> dict[str, str]:
        """The environment E0 of the tables, with changes; `None` unsets a variable.

        Each container belongs to a different pod, because a returning pod may get its old address.
        """
        pod = f"p-{changes.get('CNI_CONTAINERID', 'c1')}"
        environ: dict[str, str | None] = {
            "CNI_COMMAND": "ADD",
            "CNI_CONTAINERID": "c1",
            "CNI_NETNS": "/var/run/netns/T",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": ":".join(map(str, self.path)),
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAME={pod}",
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PODFABRIC_STATE": str(self.state),
            "PODFABRIC_RUN": str(self.root / "run"),
            "PODFABRIC_CNI_BIN": str(self.delegates),
            "PODFABRIC_ETC": str(self.root / "etc"),
            "MARK": self.mark,
            **self.surroundings,
            **changes,
        }
        return {name: value for name, value in environ.items() if value is not None}

    def executable(self, subject: Subject) -> Path:
        paths = (directory / subject.name for directory in self.path)
        return next(path for path in paths if path.exists())

    def start(
        self,
        subject: Subject,
        environ: Mapping[str, str] | None = None,
        *,
        stdin: int | None = subprocess.PIPE,
        stdout: int | None = subprocess.PIPE,
        cwd: Path | None = None,
        umask: int = -1,
        preexec_fn: Callable[[], object] | None = None,
        through: Sequence[str] = (),
    ) -> "subprocess.Popen[bytes]":
        """Start a process; `through` is a command that runs it."""
        return subprocess.Popen(
            [*through, str(self.executable(subject))],
            env=dict(environ or self.environ()),
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=cwd or self.root,
            umask=umask,
            preexec_fn=preexec_fn,
        )

    def run(
        self,
        subject: Subject,
        environ: Mapping[str, str] | None = None,
        config: Config | None = None,
        **options: Unpack[Options],
    ) -> Outcome:
        """Make one call with a complete environment, until it ends; `options` as for `start`."""
        with self.start(subject, environ, **options) as process:
            try:
                content = encoded(subject.config() if config is None else config)
                stdout, stderr = process.communicate(
                    None if process.stdin is None else content, timeout=PATIENCE
                )
            finally:
                process.kill()
        return Outcome(process.returncode, stdout or b"", (stderr or b"").decode())

    def call(
        self,
        subject: Subject,
        command: str = "ADD",
        config: Config | None = None,
        **environ: str | None,
    ) -> Outcome:
        """Call one verb; `environ` has changes to E0."""
        return self.run(subject, self.environ(CNI_COMMAND=command, **environ), config)

    def untouched(self) -> bool:
        """Whether no call left a file."""
        return not any(path.is_file() for path in self.root.glob("state/**/*"))

    def processes(self) -> list[int]:
        """The running processes of this node."""
        pids = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
        return pids


@dataclass(frozen=True)
class Call:
    """One call of a delegate."""

    command: str
    environ: dict[str, str]
    stdin: bytes


@dataclass(frozen=True)
class Delegate:
    """The recording IPAM plugin: its name for `ipam.type`, and its directory."""

    name: str
    directory: Path

    @classmethod
    def install(cls, directory: Path, name: str = "double") -> "Delegate":
        """Put it into `directory`. It answers ADD with one address, other verbs with nothing."""
        install_delegate(directory, name)
        delegate = cls(name, directory)
        delegate.answer("ADD", {"cniVersion": "1.0.0", "ips": [{"address": "10.9.0.7/24"}]})
        return delegate

    def answer(
        self,
        command: str,
        stdout: Mapping[str, Any] | str = "",
        *,
        stderr: str = "",
        exit_code: int = 0,
        sleep: float = 0,
    ) -> None:
        """Set its answer to `command`, or to `command-containerid`."""
        directory = self.directory / "answers" / command
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stdout").write_bytes(encoded(stdout))
        (directory / "stderr").write_text(stderr)
        (directory / "exit").write_text(str(exit_code))
        (directory / "sleep").write_text(str(sleep))

    def fail(self, command: str, code: int, message: str) -> None:
        """Let it answer an error document."""
        self.answer(command, {"code": code, "msg": message}, exit_code=1)

    @property
    def calls(self) -> list[Call]:
        """Its calls, in order."""
        paths = self.directory.glob("calls/[0-9]*/[A-Z]*")
        return [_recorded(path) for path in sorted(paths, key=lambda path: int(path.parent.name))]

    @property
    def commands(self) -> list[str]:
        return [call.command for call in self.calls]


def _recorded(path: Path) -> Call:
    pairs = (path / "environ").read_text().split("\0")
    environ = dict(pair.split("=", 1) for pair in pairs if pair)
    return Call(path.name, environ, (path / "stdin").read_bytes())


def encoded(config: Config | str) -> bytes:
    """A configuration as bytes for standard input."""
    if isinstance(config, bytes):
        return config
    return config.encode() if isinstance(config, str) else json.dumps(config).encode()


def inhabitants(netns: Path) -> list[str]:
    """The processes in a namespace."""
    inode = netns.stat().st_ino
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for thread in (process / "task").iterdir():
                if (thread / "ns" / "net").stat().st_ino == inode:
                    processes.append(str(thread))
        except OSError:
            continue  # it has ended
    return processes
