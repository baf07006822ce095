"""An agent in a container, and a real interface attached and detached through it.

`unshare --mount --net python -m tests.plugins.contained DIRECTORY` uses namespaces of its own as
the host's. It prints a JSON object of what it saw.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.containers import HostPath, container
from tests.plugins import CHECKOUT
from tests.plugins.service import install_launchers
from tests.waiting import until

PAGE = CHECKOUT / "docs/agent.md"
UNIT = CHECKOUT / "agent/units/podfabric-agent.service"
ROW = re.compile(r"\| `(/[^`]*)` \| `(/[^`]*)` \| (ro|rw)(, HostToContainer)? \|")
LENT = (
    "/proc",
    "/sys",
    "/dev",
    "/run/netns",
)  # the host's own; all others are below the test's directory


def documented() -> list[HostPath]:
    """The mounts of docs/agent.md."""
    section = PAGE.read_text().partition("## In a container")[2].partition("\n## ")[0]
    return [
        HostPath(Path(source), to, mode == "rw", "HostToContainer" if slave else "None")
        for source, to, mode, slave in ROW.findall(section)
    ]


def capabilities() -> list[str]:
    """Those of the unit file."""
    (line,) = re.findall(r"^CapabilityBoundingSet=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(line).split()


def main(root: Path) -> None:
    """Run the agent, attach, detach."""
    mounts = []
    for mount in documented():
        place = mount.source if str(mount.source) in LENT else root / str(mount.source)[1:]
        place.mkdir(parents=True, exist_ok=True)
        mounts.append(mount._replace(source=place))
    netns = root / "netns"
    netns.mkdir()
    names = Path("/run/netns")
    names.mkdir(exist_ok=True)
    run("mount", "--bind", str(netns), str(names))
    run("mount", "--make-rshared", str(names))  # as a runtime has it
    (root / "etc/podfabric/config.yaml").write_text('agent:\n  listen: ""\n')
    install_launchers(root / "opt/cni/bin", ["moved"])
    seen: dict[str, object] = {"capabilities": len(capabilities())}
    with container(
        root / "container",
        [sys.executable, "-m", "tests.plugins.nursery"],
        capabilities(),
        mounts,
        {"PODFABRIC_PROC": "/host/proc", "PYTHONDONTWRITEBYTECODE": "1"},
        CHECKOUT,
    ) as agent:
        until((root / "run/podfabric/agent.sock").is_socket, what="socket")
        pod = names / "pod"  # made after the container's mounts
        pod.touch()
        subprocess.run(["unshare", f"--net={pod}", "true"], check=True)
        run("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
        seen["added"] = call(root, "ADD", pod)
        seen["inside"] = links("nsenter", f"--net={pod}")
        (entry,) = (root / "var/lib/podfabric/attachments").iterdir()
        seen["entry"] = entry.read_text()
        seen["view"] = agent.run("readlink", "/proc/self/ns/mnt").stdout.strip()
        seen["deleted"] = call(root, "DEL", pod)
        seen["back"] = links()
        seen["left"] = os.listdir(root / "var/lib/podfabric/attachments")  # noqa: PTH208
        seen["state"] = agent.run(
            str(Path(sys.executable).with_name("podfabric")), "agent", "--state"
        ).stdout.strip()
        seen["write"] = agent.run("touch", "/etc/x").stderr
        seen["sysctl"] = agent.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward").stderr
        seen["status"] = Path(f"/proc/{agent.pid}/status").read_text()
        seen["hidden"] = hidden(agent.run)
    print(json.dumps(seen))  # noqa: T201


def hidden(run_inside: "object") -> bool:
    """Whether the agent's code sees a process' namespace that has no path."""
    script = (
        "from pathlib import Path; from host import procfs; "
        "from host.namespaces import NetworkNamespace as N; "
        "procfs.use(Path('/host/proc')); print(*(one.inode for one in N.every()))"
    )
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as process:
        own, there = (Path(f"/proc/{pid}/ns/net") for pid in ("self", process.pid))
        until(lambda: there.stat().st_ino != own.stat().st_ino, what="namespace")
        shown = run_inside(sys.executable, "-c", script).stdout.split()  # type: ignore[operator]
        inode = there.stat().st_ino
        assert process.stdin is not None
        process.stdin.close()
        return str(inode) in shown


def call(root: Path, command: str, pod: Path) -> dict[str, object]:
    """A call as a runtime makes it, which must succeed."""
    config = {
        "cniVersion": "1.0.0",
        "name": "n1",
        "type": "moved",
        "device": "veth0",
        "ipam": {"type": "podfabric-ipam", "range": "10.9.0.0/24"},
    }
    done = subprocess.run(
        [root / "opt/cni/bin/moved"],
        input=json.dumps(config).encode(),
        env={
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": "c1",
            "CNI_NETNS": f"/var/run/netns/{pod.name}",
            "CNI_IFNAME": "net1",
            "CNI_PATH": str(root / "opt/cni/bin"),
            "PODFABRIC_SOCKET": str(root / "run/podfabric/agent.sock"),
        },
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, (done, (root / "container/log").read_text())
    return dict(json.loads(done.stdout or b"{}"))


def links(*through: str) -> list[str]:
    """The names of the interfaces."""
    shown = run(*through, "ip", "-json", "link")
    return sorted(one["ifname"] for one in json.loads(shown))


def run(*command: str) -> str:
    """A command that must succeed; its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
