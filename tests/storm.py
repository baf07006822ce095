"""Clients that attach and detach while the agent is killed, and the conditions that must hold.

Every client does what a runtime does: after an ADD that failed or was answered by an error, it
calls DEL until that succeeds. With `Kills` it also kills launchers.
"""

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import until

PATIENCE = 240.0  # seconds until a DEL must have succeeded, or a pod must have been attached
# Errors that no client may get: each shows that an address or attachment leaked or was lost.
LEAKS = {
    102: "CHECK found a difference",
    103: "is attached already",
    110: "no address is free",
}


class Kills:
    """The number of launchers to kill, the number killed, and the moment of each kill."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.done = 0
        self._lock = threading.Lock()
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=200))

    @property
    def enough(self) -> bool:
        return self.done >= self.wanted

    def took(self, command: str, seconds: float) -> None:
        """Record the time of a complete call."""
        self._times[command].append(seconds)

    def moment(self, command: str) -> float:
        """Seconds from a launcher's start to its kill: a random part of a complete call's time."""
        times = self._times[command]
        return random.uniform(0, 1.1) * random.choice(list(times)) if times else 0.0

    def count(self) -> None:
        with self._lock:
            self.done += 1


@dataclass
class Seen:
    """The observations of the clients; any entry in `wrong` fails the test."""

    results: int = 0
    errors: dict[int, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)  # of the errors
    wrong: list[str] = field(default_factory=list)
    _held: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def result(self, container: str, addresses: list[str]) -> None:
        with self._lock:
            self.results += 1
            for address in addresses:
                holder = self._held.setdefault(address, container)
                if holder != container:
                    self.wrong.append(f"{address} was given to {holder} and to {container}")

    def error(self, code: int, text: str) -> None:
        with self._lock:
            self.errors[code] = self.errors.get(code, 0) + 1
            self.texts.append(text)
            if code in LEAKS:
                self.wrong.append(f"{LEAKS[code]}: {text}")

    def leaving(self, container: str) -> None:
        """Mark the container as leaving: another container may get its addresses from here on."""
        with self._lock:
            self._held = {a: c for a, c in self._held.items() if c != container}

    def amiss(self, text: str) -> None:
        with self._lock:
            self.wrong.append(text)


@dataclass
class Client:
    """A runtime that attaches one container after the other to `netns`."""

    number: int
    executable: Path
    config: Mapping[str, Any]
    environ: Mapping[str, str]
    seen: Seen
    netns: str = "/none"
    ifname: str = "net1"
    pause: float = 0.05  # seconds before a DEL is repeated
    patience: float = PATIENCE
    kills: Kills | None = None

    def run_until(self, over: Callable[[], bool]) -> None:
        cycle = 0
        while not over():
            # Attaching the same container again reveals late effects of an earlier call.
            if cycle == 0 or random.random() < 0.5:
                cycle += 1
            self._attach(f"c{self.number}-{cycle}")

    def _attach(self, container: str) -> None:
        killed = self._killed("ADD", container) if random.random() < 0.75 else False
        if not killed:
            exit_code, document = self._call("ADD", container)
            if exit_code == 0:
                self.seen.result(container, [ip["address"] for ip in document["ips"]])
                if random.random() < 0.5:
                    self._call("CHECK", container, {"prevResult": document})
        self.seen.leaving(container)
        while random.random() < 0.4 and self._killed("DEL", container):
            pass
        deadline = time.monotonic() + self.patience
        while self._call("DEL", container)[0] != 0:
            if time.monotonic() > deadline:
                self.seen.amiss(f"{container} could not be removed")
                return
            time.sleep(self.pause)

    def _killed(self, command: str, container: str) -> bool:
        """Start a call and kill its launcher. Returns False if no launcher is left to kill."""
        if self.kills is None or self.kills.enough:
            return False
        with self._started(command, container) as process:
            time.sleep(self.kills.moment(command))
            process.kill()
            process.communicate()
        if process.returncode == -signal.SIGKILL:
            self.kills.count()
        return True

    def _call(
        self, command: str, container: str, more: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        started = time.monotonic()
        with self._started(command, container, more) as process:
            try:
                stdout, stderr = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if self.kills is not None and process.returncode == 0:
            self.kills.took(command, time.monotonic() - started)
        done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
        return done.returncode, self._document(command, container, done)

    def _started(
        self, command: str, container: str, more: Mapping[str, Any] | None = None
    ) -> "subprocess.Popen[bytes]":
        environ = {
            **self.environ,
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": self.netns,
            "CNI_IFNAME": self.ifname,
            "CNI_PATH": str(self.executable.parent),
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAME={container}",
        }
        # A file in memory: a write into the pipe of a killed process would fail.
        with os.fdopen(os.memfd_create("config"), "w+b") as stdin:
            stdin.write(json.dumps({**self.config, **(more or {})}).encode())
            stdin.seek(0)
            return subprocess.Popen(
                [self.executable],
                env=environ,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

    def _document(
        self, command: str, container: str, done: "subprocess.CompletedProcess[bytes]"
    ) -> dict[str, Any]:
        """The answer. It must be a result, empty, or one error document."""
        try:
            document = json.loads(done.stdout) if done.stdout else {}
            if done.returncode == 0 and ("ips" in document) is (command == "ADD"):
                return dict(document)
            if done.returncode == 1 and document["msg"] and document["cniVersion"]:
                self.seen.error(document["code"], f"{command} {container}: {document['msg']}")
                return dict(document)
        except (ValueError, KeyError, TypeError):
            pass
        self.seen.amiss(f"{command} {container}: {done}")
        return {}


def run_beside(clients: list[Client], work: Callable[[], object]) -> None:
    """Let the clients attach and detach until `work` has ended."""
    over = threading.Event()
    with ThreadPoolExecutor(len(clients)) as pool:
        futures = [pool.submit(client.run_until, over.is_set) for client in clients]
        try:
            work()
        finally:
            over.set()
        for future in futures:
            future.result()


def kill_often(
    pid_file: Path, kills: int, clients: list[Client], pause: tuple[float, float]
) -> None:
    """Kill the agent `kills` times at random moments while the clients work.

    `pause` is the shortest and the longest time between two kills, in seconds. On a machine that
    needs longer for an attachment, the longest time grows. Each kill waits for an attachment since
    the last one, so that it hits an agent that has worked.
    """
    seen = clients[0].seen

    def work() -> None:
        shortest, longest = pause
        longest = max(longest, 2 * _next_attachment(seen, 0))
        killed, results = 0, 0
        for _ in range(kills):
            time.sleep(random.uniform(shortest, longest))
            if seen.results == results:
                _next_attachment(seen, results)
                time.sleep(random.uniform(0, shortest))
            results = seen.results
            killed = _kill_another(pid_file, killed)

    run_beside(clients, work)


def kill_launchers(pid_file: Path, agents: int, clients: list[Client], seconds: float) -> None:
    """Let the clients kill launchers until enough are killed; kill `agents` agents meanwhile.

    The kills of agents are spread over the kills of launchers. It ends early if something is wrong,
    or after `seconds` in which a launcher was killed and a container attached.
    """
    kills, seen = clients[0].kills, clients[0].seen
    assert kills is not None
    end = time.monotonic() + seconds
    over = end + 10 * PATIENCE

    def has_seen_both() -> bool:
        return bool(kills.done and seen.results) or time.monotonic() > over

    def work() -> None:
        killed, so_often = 0, 0
        while not (kills.enough or seen.wrong or (time.monotonic() > end and has_seen_both())):
            if kills.done >= kills.wanted * (so_often + 1) // (agents + 1):
                so_often += 1
                killed = _kill_another(pid_file, killed)
            time.sleep(random.uniform(0.002, 0.02))

    run_beside(clients, work)


def _next_attachment(seen: Seen, results: int) -> float:
    """Wait until there are more than `results` results; returns the seconds that took."""
    started = time.monotonic()
    until(lambda: seen.results != results, PATIENCE, "attachment", pause=0.002)
    return time.monotonic() - started


def _kill_another(pid_file: Path, before: int) -> int:
    """Kill the agent once its pid differs from `before`; returns its pid."""

    def kill() -> int:
        with suppress(OSError, ValueError):
            pid = int(pid_file.read_text())
            if pid != before:
                os.kill(pid, signal.SIGKILL)
                return pid
        return 0

    return until(kill, PATIENCE, "agent that is back", pause=0.002)
