"""gRPC in an agent, and the processes that the agent starts."""

import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE

PROGRAM = """
import sys
from pathlib import Path
from cni.spec import delegate
from deviceplugin.kubelet import plugin_sockets
from deviceplugin.kubelet.pod_resources import open_channel
import grpc

directory, failed = Path(sys.argv[1]), 0
for _ in range(40):
    listener = plugin_sockets.Listener(directory, "a/b", lambda server: None, 4)
    with open_channel(listener.path) as channel:
        grpc.channel_ready_future(channel).result(120)
        child = delegate._spawn(Path("/bin/true"), {}, b"")
        child.communicate()
        failed += child.returncode != 0
    listener.close(lambda: None, 0)
sys.exit(failed)
"""


def test_delegates_survive_their_fork_beside_grpc(root: Path) -> None:
    root.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
