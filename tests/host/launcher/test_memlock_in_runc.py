"""The hook podfabric-memlock in a container runtime: starts that work, and starts that fail."""

import json
import re
import resource
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.allocate.memlock import HOOK

SOFT, HARD = 64 << 10, 1 << 20  # anybody may raise the soft limit
LOW, RAISED = (str(SOFT), str(HARD)), (str(HARD), str(HARD))
LIMIT = re.compile(r"^Max locked memory +(\S+) +(\S+)", re.MULTILINE)
RUNC = shutil.which("runc") or ""

pytestmark = pytest.mark.skipif(not RUNC, reason="needs runc")


class Runtime:
    """Starts containers that print their limits. Each start runs `hook` with its arguments."""

    def __init__(self, directory: Path, hook: Path) -> None:
        self._bundle = directory
        self.hook = hook
        self._real = hook.parent / "real" / HOOK
        self.arguments = [HOOK, str(HARD)]
        (directory / "rootfs/bin").mkdir(parents=True)
        for name in ("dev", "proc"):
            (directory / "rootfs" / name).mkdir()
        shutil.copy("/bin/busybox", directory / "rootfs/bin")

    def start(self, user: int = 0) -> "subprocess.CompletedProcess[str]":
        hook = {"path": str(self.hook), "args": self.arguments}
        document = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": user, "gid": user},
                "args": ["/bin/busybox", "cat", "/proc/self/limits"],
                "cwd": "/",
                "noNewPrivileges": True,
            },
            "root": {"path": "rootfs"},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}]},
            "hooks": {"createRuntime": [hook] if self.arguments else []},
        }
        (self._bundle / "config.json").write_text(json.dumps(document))
        command = [RUNC, "--root", str(self._bundle / "runc")]
        name = f"pf-{uuid.uuid4().hex[:10]}"
        done = subprocess.run(
            [*command, "run", "--bundle", str(self._bundle), name],
            capture_output=True, text=True, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (SOFT, HARD)),
        )  # fmt: skip
        left = subprocess.run([*command, "list", "-q"], capture_output=True, text=True, check=True)
        assert left.stdout == ""
        return done

    def remove_hook(self) -> None:
        self._real.parent.mkdir()
        self.hook.rename(self._real)

    def restore_hook(self) -> None:
        self._real.rename(self.hook)

    def hook_is(self, script: str) -> None:
        """Replace the hook with a script, in which HOOK is the removed hook."""
        self.remove_hook()
        self.hook.write_text(f"#!/bin/sh\n{script.replace('HOOK', str(self._real))}\n")
        self.hook.chmod(0o755)

    def limit(self, user: int = 0) -> tuple[str, ...]:
        done = self.start(user)
        match = LIMIT.search(done.stdout)
        assert match, done
        return match.groups()


@pytest.fixture
def runtime(directory: Path, built: Path) -> Iterator[Runtime]:
    (directory / "bundle").mkdir()
    yield Runtime(directory / "bundle", Path(shutil.copy(built, directory / HOOK)))


@pytest.mark.parametrize("user", [0, 1000])
def test_only_a_container_with_the_hook_gets_the_limit(runtime: Runtime, user: int) -> None:
    assert runtime.limit(user) == RAISED
    runtime.arguments = []
    assert runtime.limit(user) == LOW


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 $$", "signal: killed"),
        ('HOOK "$1" && kill -9 $$', "signal: killed"),  # the limit is raised, but the runtime waits
        ("echo no memory >&2; exit 3", "no memory"),
        (None, "no such file"),
    ],
)
def test_a_failed_hook_is_told_and_the_next_start_works(
    runtime: Runtime, script: str | None, words: str
) -> None:
    if script is None:
        runtime.remove_hook()
    else:
        runtime.hook_is(script)
    done = runtime.start()
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert "hook" in done.stderr or str(runtime.hook) in done.stderr
    runtime.restore_hook()
    assert runtime.limit() == RAISED


def test_a_container_starts_with_its_own_limit_if_the_kernel_refuses_a_higher_limit(
    runtime: Runtime, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    runtime.hook_is(f"exec setpriv --bounding-set=-sys_resource HOOK {HARD + 1} 2> {said}")
    assert runtime.limit() == LOW
    assert "cannot be raised (EPERM, errno 1)" in said.read_text()
