"""The files of ours that a CNI call visits, beginning with the plugin's verb.

`python -m tools.walk ADD|DEL ipoib|sriov`, as root on a machine with the drivers: in the virtual
machine,
`python -m tests.kernel.vm run -- .venv/bin/python -m tools.walk ADD ipoib`.

A file counts if a function of it runs between the start and the end of the verb. Functions are
listed in the order of their first call, as a reader follows them. A stay is a run of functions in
one file. A return is a stay in a file that was left before. A climb is a call into a layer above
the caller's. Generated methods (msgspec, NamedTuple) and lambdas have nothing to read and do not
count.
"""

import argparse
import sys
from collections import Counter
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cni", "ipam", "policy", "deviceplugin", "gpu", "host", "kube", "base")
LAYERS = (  # from the top; a call from a later into an earlier one is a climb
    ("cni/ipoib", "cni/sriov"),
    ("cni/attachments",),
    ("ipam",),
    ("policy",),
    ("deviceplugin",),
    ("gpu",),
    ("host",),
    ("kube",),
    ("cni/spec",),
    ("base",),
)


class Walk:
    """The functions that run between `start` and `stop` in this thread."""

    def __init__(self) -> None:
        self.files: list[str] = []  # the file of each function, in the order of first calls
        self.climbs = 0
        self._seen: set[CodeType] = set()

    def start(self) -> None:
        """Begin to record."""
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        """End recording."""
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:  # noqa: ANN401
        if event != "call" or frame.f_code in self._seen:
            return
        file = _ours(frame.f_code)
        if file is None:
            return
        self._seen.add(frame.f_code)
        self.files.append(file)
        above = frame.f_back
        while above is not None and _file(above.f_code) is None:
            above = above.f_back
        caller = _file(above.f_code) if above is not None else None
        if caller is not None and _layer(file) < _layer(caller):
            self.climbs += 1

    def report(self) -> None:
        """Print it."""
        for what, package in (("all of ours", ""), ("cni/ alone", "cni/")):
            stays = [file for file, _ in groupby(f for f in self.files if f.startswith(package))]
            files = len(set(stays))
            print(f"{what}: {files} files, {len(stays)} stays, {len(stays) - files} returns")
        print(f"climbs: {self.climbs}")
        visits = Counter(file for file, _ in groupby(self.files))
        for package in PACKAGES:
            own = [file for file in dict.fromkeys(self.files) if file.startswith(f"{package}/")]
            listed = ", ".join(f"{file.removeprefix(package + '/')}×{visits[file]}" for file in own)
            print(f"{package} ({len(own)}): {listed}")


def _ours(code: CodeType) -> str | None:
    """The file of a function of ours that a reader visits; `None` for other code."""
    return None if code.co_name in ("<module>", "<lambda>") else _file(code)


def _file(code: CodeType) -> str | None:
    path = code.co_filename
    if not path.startswith(f"{ROOT}/"):
        return None
    file = path.removeprefix(f"{ROOT}/")
    return file if file.startswith(tuple(f"{package}/" for package in PACKAGES)) else None


def _layer(file: str) -> int:
    for number, folders in enumerate(LAYERS):
        if file.startswith(tuple(f"{folder}/" for folder in folders)):
            return number
    return len(LAYERS)


def main() -> None:
    """Attach and detach a pod on this machine, and follow one of the two calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("ADD", "DEL"))
    parser.add_argument("plugin", choices=("ipoib", "sriov"))
    arguments = parser.parse_args()
    walk = Walk()
    with ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory(prefix="podfabric-walk-")))
        follow(walk, arguments.verb, arguments.plugin, root, stack)
    print(f"\n{arguments.verb} of {arguments.plugin}")
    walk.report()


def follow(walk: Walk, verb: str, plugin: str, root: Path, stack: ExitStack) -> None:
    """Record the call, after a first call that has imported and built everything."""
    from tests.kernel.cards import cards
    from tests.kernel.igb import with_addressed_vfs
    from tests.kernel.pods import Node, SriovNode, pod

    config: dict[str, Any] = {
        "ipam": {
            "type": "podfabric-ipam",
            "range": "10.2.0.0/24",
            "routes": [{"dst": "10.9.0.0/16"}],
        }
    }
    if plugin == "ipoib":
        node = Node(root)
    else:
        card = stack.enter_context(with_addressed_vfs(cards()[0], 3))
        node = SriovNode(root)
        config |= {"deviceID": card.vfs[0], "vlan": 5}
    netns = stack.enter_context(pod("walk"))
    node.add("c0", netns, **config)
    node.delete("c0", netns, **config)
    method = {"ADD": "add", "DEL": "delete"}[verb]
    kind = type(node.plugin())
    original = getattr(kind, method)

    def followed(self: Any, request: Any) -> Any:  # noqa: ANN401
        walk.start()
        try:
            return original(self, request)
        finally:
            walk.stop()

    setattr(kind, method, followed)
    node.add("c1", netns, **config)
    node.delete("c1", netns, **config)


if __name__ == "__main__":
    main()
