"""What an executable of a plugin begins with: it works on the node's files only without an agent.

An agent that serves holds the lock `Paths.agent_lock`. An executable shares it with other
executables until its process ends, so an agent that starts waits for running calls.
"""

import fcntl
import os

from base.paths import Paths
from cni.spec.errors import CNIError, Code


def paths() -> Paths:
    """The node's files. CNIError 114 if an agent owns them, 5 if that cannot be seen."""
    node = Paths.from_environ(os.environ)
    try:
        lock = os.open(node.agent_lock, os.O_RDONLY | os.O_CLOEXEC)  # open until the process ends
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        pass  # no agent has served here
    except BlockingIOError:
        raise CNIError(
            Code.AGENT_OWNS,
            f"an agent owns {node.state} (it holds {node.agent_lock}): nothing was done; have the "
            "runtime start the launcher, which `podfabric install` puts into its directory, or "
            "stop the agent",
        ) from None
    except OSError as error:
        raise CNIError(
            Code.IO_FAILURE, f"cannot lock {node.agent_lock}: {error.strerror}: run it as root"
        ) from None
    return node
