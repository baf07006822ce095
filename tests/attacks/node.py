"""A Kubernetes node under attack. Its HCAs are files below a directory; the rest is real.

Calls go through `cni.spec.dispatch.answer`, to a real network namespace. The devices have no
interface in this kernel. So an ADD that passes every rule fails for that reason.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from base.paths import Paths
from base.pod import Pod
from cni.attachments.journal import Journal, JournalEntry, Phase
from cni.ipoib.plugin import IPoIB
from cni.spec.attachment import Attachment
from cni.spec.dispatch import answer
from cni.spec.notes import collected
from cni.sriov.plugin import Sriov
from tests.unit.deviceplugin.holding import Holding

TENANT = Pod("tenant", "attacker", "uid-attacker")
OTHER = Pod("victims", "victim", "uid-victim")
ATTACHMENT = Attachment("fabric", "attacker", "net1")
PASSED = "has no interface on the host"  # no rule refused the call


class Reply(NamedTuple):
    """The answer to one call, and the notes for the administrator."""

    code: int
    text: str
    notes: str


class Attacked(Holding):
    """The node; `give` and `registered` set the devices of its pods and pools."""

    def __init__(self, paths: Paths, netns: Path) -> None:
        super().__init__(paths)
        boot_id = paths.proc / "sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True, exist_ok=True)
        boot_id.write_text("this boot\n")
        self._netns = netns

    def allow(self, **policy: object) -> None:
        """Write these rules into the node's configuration."""
        self.paths.etc.mkdir(exist_ok=True)
        self.paths.config.write_text(json.dumps({"policy": policy}))

    def call(
        self,
        command: str = "ADD",
        plugin: str = "sriov",
        pod: Pod | None = TENANT,
        container: str = "attacker",
        path: str = "/nowhere",
        raw: bytes = b"",
        **config: Any,  # noqa: ANN401
    ) -> Reply:
        """A call for a pod; without a pod, as cnitool calls. `raw` replaces the whole input."""
        args = (
            f"K8S_POD_NAMESPACE={pod.namespace};K8S_POD_NAME={pod.name};K8S_POD_UID={pod.uid}"
            if pod is not None
            else ""
        )
        environ = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": str(self._netns),
            "CNI_IFNAME": "net1",
            "CNI_ARGS": args,
            "CNI_PATH": path,
        }
        document = {"cniVersion": "1.1.0", "name": "fabric", "type": plugin, **config}
        stdin = raw or json.dumps(document).encode()
        kind = Sriov if plugin == "sriov" else IPoIB
        with collected() as notes:
            reply = answer(lambda: kind(self.paths), environ, lambda: stdin)
        error = json.loads(reply.document or b"{}")
        return Reply(error.get("code", 0), error.get("msg", ""), notes.text)

    def has_attached(self, ipam: str) -> None:
        """Write an attachment of an earlier boot into the journal; its ADD had that `ipam`
        (JSON)."""
        Journal(self.paths).write(
            JournalEntry(
                plugin="sriov",
                network=ATTACHMENT.network,
                container_id=ATTACHMENT.container_id,
                ifname=ATTACHMENT.ifname,
                netns="/nowhere/ns",
                netns_identity="cookie:0",
                boot_id="another boot",
                phase=Phase.ATTACHED,
                config=f'{{"name":"fabric","type":"sriov","ipam":{ipam}}}',
            )
        )

    def touched(self) -> list[str]:
        """The files that calls left: journal, locks of devices, claims of pods."""
        return [
            str(path.relative_to(self.paths.state.parent))
            for directory in (self.paths.attachments, self.paths.locks, self.paths.devices / "pods")
            for path in sorted(directory.glob("*"))
        ]
