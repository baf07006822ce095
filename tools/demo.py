"""`make demo`: two pods, each with an HCA and an interface on it, from admission to removal.

Runs on a machine with HCAs that have IPoIB interfaces; the virtual machine of tests/kernel has two.
Everything is real except the kubelet: the agent with its device plugin, the executables that a
runtime starts, the stock IPoIB driver, two namespaces. The kubelet is the tests' stand-in.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.kubelet import Kubelet, Pod
from tests.runtime import CHECKOUT, Definition, Outcome, Runtime, definitions, pods
from tools.page import PODFABRIC, Page

EXAMPLE = CHECKOUT / "netattach-examples/ipoib-auto.yaml"
PODS = ("worker-0", "worker-1")
STATE = Path("/var/lib/podfabric")
SOCKET = Path("/run/podfabric/agent.sock")
FUNCTIONS = Path("/sys/bus/pci/devices")
NETWORK_CARD = "0x020000"
PATIENCE = 60.0  # seconds


def main() -> int:
    """Run the demonstration; returns 0 if every step succeeded."""
    show = Page()
    show.title("podfabric: two pods, each with an HCA and the interface on it")
    place_hcas()
    before = host_interfaces()
    definition, container = definitions(EXAMPLE)[0], pods(EXAMPLE)[0]["spec"]["containers"][0]
    (resource,) = container["resources"]["limits"]
    limits = {resource: int(container["resources"]["limits"][resource])}
    show.text(f"definition  {EXAMPLE.relative_to(CHECKOUT)}: {json.dumps(definition.config)}")
    show.text(f"container   limits {json.dumps(limits)}")
    with ExitStack() as stack:
        # This is never the root of a real kubelet. The path is short, for sockets.
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="pf-demo-"))
        os.environ["PODFABRIC_KUBELET"] = root
        show.title("0  a kubelet, and the agent: the resource is offered")
        kubelet = stack.enter_context(Kubelet(Path(root)))
        ended = stack.enter_context(agent(show))
        show.timed(f"{resource}", partial(offered, kubelet, resource))
        launchers = Path(root, "bin")
        launchers.mkdir()
        run(PODFABRIC, "install", "--bin-dir", str(launchers))
        wanted = {"name": container["name"], "limits": limits}
        tour(show, Runtime(launchers), kubelet, definition, wanted)
        ended()
        show.title("9  what is left")
        left = {
            "interfaces on the host": sorted(host_interfaces() - before),
            "journal entries": sorted(p.name for p in (STATE / "attachments").glob("*")),
            "reservations": reservations(),
            "sockets at the kubelet": sorted(
                path.name for path in kubelet.directory.glob("*podfabric*")
            ),
        }
        for what, names in left.items():
            show.step(f"{what}: {', '.join(names) or 'none'}", not names)
    return show.verdict()


def tour(
    show: Page,
    runtime: Runtime,
    kubelet: Kubelet,
    definition: Definition,
    container: dict[str, Any],
) -> None:
    """Admit, attach, compare, ping, explain, check, detach."""
    show.title("1  podfabric topo: where the HCAs are")
    show.command("topo")

    show.title("2  the kubelet admits the pods: each container gets a verbs device")
    admitted: dict[str, Pod] = {}
    for name in PODS:
        run("ip", "netns", "add", name)
        started = time.monotonic()
        pod = admitted[name] = kubelet.admit(name, [container], namespace="demo", uid=f"uid-{name}")
        allocated = pod.containers[container["name"]]
        show.step(f"{name} holds {held(pod)}", True, time.monotonic() - started)
        show.text(f"  {', '.join(sorted(allocated.devices))}")
        show.text(f"  NCCL_IB_HCA {allocated.env.get('NCCL_IB_HCA')}")

    show.title('3  ADD with "master": "auto": an interface and an address')
    results: dict[str, dict[str, Any]] = {}
    for name in PODS:
        outcome = call(runtime, "ADD", definition, name)
        if not show.step(f"ADD {name}", outcome.exit_code == 0, outcome.seconds, outcome.stdout):
            return
        results[name] = outcome.document
        interface, ip = results[name]["interfaces"][0], results[name]["ips"][0]
        show.text(f"  {interface['name']}  {ip['address']}  {described(name)}")

    show.title("4  one HCA: the container's device node, and the device beside the pod's interface")
    for name in PODS:
        node, beside = numbers_of(admitted[name]), numbers_beside(name)
        interface = results[name]["interfaces"][0]
        show.step(
            f"{name}  {', '.join(f'{path} is {number}' for path, number in node.items())}; "
            f"net1 is on {interface['rdmaDevice']} ({interface['uverbs']}), {', '.join(beside)}",
            sorted(node.values()) == beside,
        )
    show.step(
        "the pods' HCAs differ",
        numbers_of(admitted[PODS[0]]).values() != numbers_of(admitted[PODS[1]]).values(),
    )

    show.title("5  ping over IPoIB")
    for source, target in (PODS, PODS[::-1]):
        address = results[target]["ips"][0]["address"].partition("/")[0]
        show.timed(f"{source} -> {target} ({address})", partial(ping, source, address))

    show.title(f"6  podfabric explain demo/{PODS[0]}")
    show.command("explain", f"demo/{PODS[0]}")

    show.title("7  CHECK: everything still as it was set")
    for name in PODS:
        outcome = call(runtime, "CHECK", definition, name, results[name])
        show.step(f"CHECK {name}", outcome.exit_code == 0, outcome.seconds, outcome.stdout)

    show.title("8  DEL, the pods go, the agent ends")
    for name in PODS:
        outcome = call(runtime, "DEL", definition, name, results[name])
        show.step(f"DEL {name}", outcome.exit_code == 0, outcome.seconds, outcome.stdout)
        inside = [ifname for ifname in interfaces(name) if ifname != "lo"]
        show.step(f"interfaces in {name}: {', '.join(inside) or 'none'}", not inside)
        kubelet.remove(admitted[name])
        run("ip", "netns", "del", name)


@contextmanager
def agent(show: Page) -> Iterator[Callable[[], None]]:
    """The agent. The yielded function ends it, and so does the end of the block."""
    started = time.monotonic()
    process = subprocess.Popen([PODFABRIC, "agent"], stderr=subprocess.DEVNULL)

    def end() -> None:
        process.terminate()
        code = process.wait(PATIENCE)
        show.step(f"the agent ends with exit code {code}", code == 0)

    try:
        up = wait_for(SOCKET, process)
        show.step(f"podfabric agent serves {SOCKET}", up, time.monotonic() - started)
        yield end
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE)


def offered(kubelet: Kubelet, resource: str) -> str:
    """Wait until the kubelet can allocate the resource."""
    try:
        count = kubelet.wait(lambda: kubelet.allocatable(resource), PATIENCE)
    except AssertionError as error:
        raise subprocess.CalledProcessError(1, "kubelet", str(error)) from None
    hcas = {device_id.rpartition("-")[0] for device_id in kubelet.devices(resource)}
    return f"allocatable: {count} device ids of {len(hcas)} HCAs, {', '.join(sorted(hcas))}"


def wait_for(path: Path, process: "subprocess.Popen[bytes]") -> bool:
    """Whether the socket appears before the process ends."""
    while not path.is_socket():
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    return True


def place_hcas() -> None:
    """Give each software HCA of the virtual machine a PCI function, as real HCAs have."""
    if not Path("/sys/module/ibloop").exists():
        return
    functions = sorted(
        path.name
        for path in FUNCTIONS.iterdir()
        if (path / "class").read_text().strip() == NETWORK_CARD
    )
    run("/sbin/modprobe", "--remove", "ibloop")
    run("/sbin/modprobe", "ibloop", f"parents={','.join(functions[:2])}")
    deadline = time.monotonic() + PATIENCE
    for parent in ("ib0", "ib1"):
        while not (Path("/sys/class/net") / parent).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        run("ip", "link", "set", parent, "up")
        while not carrier(parent) and time.monotonic() < deadline:
            time.sleep(0.05)


def carrier(interface: str) -> bool:
    """Whether the interface is up and its partition is joined."""
    return (Path("/sys/class/net") / interface / "carrier").read_text().strip() == "1"


def call(
    runtime: Runtime,
    command: str,
    definition: Definition,
    pod: str,
    previous: dict[str, Any] | None = None,
) -> Outcome:
    """Call one verb for one pod, as Multus does."""
    return runtime.call(
        command,
        definition.config,
        container_id=f"sandbox-{pod}",
        netns=f"/var/run/netns/{pod}",
        args=f"IgnoreUnknown=1;K8S_POD_NAMESPACE=demo;K8S_POD_NAME={pod};K8S_POD_UID=uid-{pod}",
        previous=previous,
    )


def ping(pod: str, address: str) -> str:
    """Send three echoes; returns the summary that ping prints."""
    output = run("ip", "netns", "exec", pod, _ping(), "-c", "3", "-i", "0.2", "-W", "5", address)
    received = re.search(r"(\d+) received", output)
    times = re.search(r"= [\d.]+/([\d.]+)/", output)
    if received is None or received[1] != "3":
        raise subprocess.CalledProcessError(1, "ping", output)
    return f"3 of 3 answered, {times[1] if times else '?'} ms on average"


def held(pod: Pod) -> str:
    """The device ids of a pod's containers."""
    every = [
        device_id
        for container in pod.containers.values()
        for ids in container.ids.values()
        for device_id in ids
    ]
    return ", ".join(sorted(every))


def numbers_of(pod: Pod) -> dict[str, str]:
    """Major and minor number of each uverbs device node of the pod's containers, by path."""
    numbers = {}
    for container in pod.containers.values():
        for path, (host, _) in container.devices.items():
            if "uverbs" in path:
                number = Path(host).stat().st_rdev
                numbers[path] = f"{os.major(number)}:{os.minor(number)}"
    return numbers


def numbers_beside(pod: str) -> list[str]:
    """The numbers of the verbs devices on the HCA of the pod's interface, seen from inside the pod.

    The interface's address contains the GUID of its port.
    """
    command = (
        "cat /sys/class/net/net1/address; "
        "for verbs in /sys/class/infiniband_verbs/uverbs*; do "
        "echo $(cat $verbs/dev) $(cat /sys/class/infiniband/$(cat $verbs/ibdev)/ports/1/gids/0); "
        "done"
    )
    address, *lines = run("ip", "netns", "exec", pod, "/bin/sh", "-c", command).splitlines()
    guid = address.replace(":", "")[-16:]
    numbers = (line.split() for line in lines)
    return sorted(number for number, gid in numbers if gid.replace(":", "").endswith(guid))


def described(pod: str) -> str:
    """The pod's interface, as `ip` prints it."""
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
    """The holders of addresses, as the store's command prints them."""
    listed = run(PODFABRIC, "ipam", "list", "--output", "json")
    return [reservation["address"] for reservation in json.loads(listed)]


def run(*command: str) -> str:
    """The standard output of a command. Raises CalledProcessError if the command fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _ping() -> str:
    return shutil.which("ping") or "/bin/ping"


if __name__ == "__main__":
    sys.exit(main())
