"""`make demo`: two pods on an InfiniBand fabric, from the attachment definition to the last trace.

Runs where there is an IPoIB parent (the virtual machine of tests/kernel has two). Everything is
the real thing: the executables that a runtime starts, the stock IPoIB driver, two namespaces.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.runtime import CHECKOUT, Definition, Outcome, Runtime, definitions

EXAMPLE = CHECKOUT / "netattach-examples/single-fabric.yaml"
PODS = ("worker-0", "worker-1")
STATE = Path("/var/lib/podfabric")
SOCKET = Path("/run/podfabric/agent.sock")
PODFABRIC = str(Path(sys.prefix) / "bin/podfabric")
COLOUR = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def main() -> int:
    """Run the demonstration; 0 if everything was as it must be."""
    runtime = Runtime()
    definition = definitions(EXAMPLE)[0]
    show = Page()
    before = host_interfaces()

    show.title("podfabric: two pods on an InfiniBand fabric")
    show.text(f"definition  {EXAMPLE.relative_to(CHECKOUT)}")
    show.text(f"config      {json.dumps(definition.config)}")
    show.text(f"parent      {port(definition.config['master'])}")

    show.title("0  the agent, which the executables lead to")
    started = time.monotonic()
    agent = subprocess.Popen([PODFABRIC, "agent"], stderr=subprocess.DEVNULL)
    try:
        up = wait_for(SOCKET, agent)
        show.step(f"podfabric agent serves {SOCKET}", up, time.monotonic() - started)
        tour(show, runtime, definition, before)
    finally:
        agent.terminate()
        ended = agent.wait(60)
    show.title("7  the agent ends")
    show.step(f"exit code {ended}", ended == 0)
    return show.verdict()


def tour(show: "Page", runtime: Runtime, definition: Definition, before: set[str]) -> None:
    """Attach, look, ping, check, detach, look again."""
    show.title("1  ADD: each pod gets an interface and an address")
    for pod in PODS:
        run("ip", "netns", "add", pod)
    results: dict[str, dict[str, Any]] = {}
    for pod in PODS:
        outcome = call(runtime, "ADD", definition, pod)
        if not show.step(f"ADD {pod}", outcome.exit_code == 0, outcome.seconds, outcome.stdout):
            return
        results[pod] = outcome.document
        interface, ip = results[pod]["interfaces"][0], results[pod]["ips"][0]
        show.text(f"  {interface['name']}  {ip['address']}  mtu {interface['mtu']}")
        show.text(f"  {interface['mac']}")

    show.title("2  what the kernel says in the pods")
    for pod in PODS:
        show.text(f"{pod}  {described(pod)}")

    show.title("3  ping over IPoIB")
    for source, target in (PODS, PODS[::-1]):
        address = results[target]["ips"][0]["address"].partition("/")[0]
        show.timed(f"{source} -> {target} ({address})", partial(ping, source, address))

    show.title("4  CHECK: everything still as it was set")
    for pod in PODS:
        outcome = call(runtime, "CHECK", definition, pod, results[pod])
        show.step(f"CHECK {pod}", outcome.exit_code == 0, outcome.seconds, outcome.stdout)

    show.title("5  DEL")
    for pod in PODS:
        outcome = call(runtime, "DEL", definition, pod, results[pod])
        show.step(f"DEL {pod}", outcome.exit_code == 0, outcome.seconds, outcome.stdout)

    show.title("6  what is left")
    left = {
        "interfaces in the pods": [i for p in PODS for i in interfaces(p) if i != "lo"],
        "interfaces on the host": sorted(host_interfaces() - before),
        "journal entries": sorted(p.name for p in (STATE / "attachments").glob("*")),
        "reservations": reservations(),
    }
    for what, found in left.items():
        show.step(f"{what}: {', '.join(found) or 'none'}", not found)
    for pod in PODS:
        run("ip", "netns", "del", pod)


def wait_for(path: Path, process: "subprocess.Popen[bytes]") -> bool:
    """Whether the socket appears before the process ends."""
    while not path.is_socket():
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    return True


class Page:
    """What a person reads."""

    def __init__(self) -> None:
        self._failures: list[str] = []
        self._steps = 0
        self._started = time.monotonic()

    def title(self, text: str) -> None:
        print(f"\n{_painted(text, '1;36')}", flush=True)

    def text(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def step(self, what: str, good: bool, seconds: float | None = None, output: str = "") -> bool:
        """One thing that must hold. Answers whether it does."""
        self._steps += 1
        mark = _painted("ok", "32") if good else _painted("FAILED", "1;31")
        took = _painted(f"  {seconds:.2f} s", "2") if seconds is not None else ""
        print(f"  {mark}  {what}{took}", flush=True)
        if not good:
            self._failures.append(what)
            if output.strip():
                self.text(output.strip())
        return good

    def timed(self, what: str, action: Callable[[], str]) -> None:
        """A step that answers what it saw, or raises CalledProcessError."""
        started = time.monotonic()
        try:
            seen, good = action(), True
        except subprocess.CalledProcessError as error:
            seen, good = str(error.stdout), False
        self.step(f"{what}  {seen if good else ''}", good, time.monotonic() - started, seen)

    def verdict(self) -> int:
        seconds = time.monotonic() - self._started
        if self._failures:
            print(_painted(f"\n{len(self._failures)} of {self._steps} steps failed", "1;31"))
            return 1
        print(_painted(f"\nall {self._steps} steps as they must be", "1;32"), f"({seconds:.1f} s)")
        return 0


def call(
    runtime: Runtime,
    command: str,
    definition: Definition,
    pod: str,
    previous: dict[str, Any] | None = None,
) -> Outcome:
    """One verb for one pod, as Multus would have it."""
    return runtime.call(
        command,
        definition.config,
        container_id=f"sandbox-{pod}",
        netns=f"/var/run/netns/{pod}",
        args=f"IgnoreUnknown=1;K8S_POD_NAMESPACE=demo;K8S_POD_NAME={pod};K8S_POD_UID=uid-{pod}",
        previous=previous,
    )


def ping(pod: str, address: str) -> str:
    """Three echoes; the summary that ping prints."""
    output = run("ip", "netns", "exec", pod, _ping(), "-c", "3", "-i", "0.2", "-W", "5", address)
    received = re.search(r"(\d+) received", output)
    times = re.search(r"= [\d.]+/([\d.]+)/", output)
    if received is None or received[1] != "3":
        raise subprocess.CalledProcessError(1, "ping", output)
    return f"3 of 3 answered, {times[1] if times else '?'} ms on average"


def port(master: str) -> str:
    """The adapter's port under a parent."""
    from host import infiniband, links
    from host.netlink import netlink
    from host.paths import Paths

    with netlink() as host:
        link = links.require(host, master)
    found = infiniband.port_of(Paths(), link)
    if found is None:
        return f"{master}, no port in sysfs"
    pkeys = ", ".join(f"{pkey:#06x}" for pkey in found.pkeys)
    return f"{master} on {found.hca} port {found.number}, {found.state}, P_Keys {pkeys}"


def described(pod: str) -> str:
    """The pod's interface in the kernel's words, as `ip` prints them."""
    output = run("ip", "-n", pod, "-d", "link", "show", "net1")
    words = re.search(r"<(\S+)> mtu (\d+).*?(ipoib pkey \S+ mode \S+)", output, re.DOTALL)
    return f"{words[3]} mtu {words[2]} {words[1]}" if words else output


def interfaces(pod: str) -> list[str]:
    """The interfaces of a pod."""
    return [link["ifname"] for link in json.loads(run("ip", "-n", pod, "-j", "link"))]


def host_interfaces() -> set[str]:
    """The interfaces of the host."""
    return {link["ifname"] for link in json.loads(run("ip", "-j", "link"))}


def reservations() -> list[str]:
    """Who holds an address now, by the store's own command."""
    listed = run(PODFABRIC, "ipam", "list", "--output", "json")
    return [one["address"] for one in json.loads(listed)]


def run(*command: str) -> str:
    """A command's standard output; CalledProcessError if it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _ping() -> str:
    return shutil.which("ping") or "/bin/ping"


def _painted(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text


if __name__ == "__main__":
    sys.exit(main())
