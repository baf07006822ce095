"""Sets SELinux labels, so that containers may use files of the host.

Containers may use only files with certain SELinux types (container.te of container-selinux). A
runtime labels the volumes of a pod, but not the mounts of a CDI file or a device plugin.
"""

import logging
import os
from pathlib import Path

from base.problems import Problems

READ = b"system_u:object_r:container_ro_file_t:s0"
WRITE = b"system_u:object_r:container_file_t:s0"
"""Because the labels have no categories, the containers of all pods may use the files."""

ATTRIBUTE = "security.selinux"

_log = logging.getLogger(__name__)


class ContainerLabels:
    """Labels files for containers on a node with SELinux. Logs failures."""

    def __init__(self, sys: Path) -> None:
        self._switch = sys / "fs/selinux/enforce"
        self._problems = Problems(_log)

    def set(self, path: Path, label: bytes) -> None:
        """Label a file, directory or socket, unless it has that label already."""
        if not self._switch.exists():
            return
        try:
            if _label(path) != label:
                os.setxattr(path, ATTRIBUTE, label, follow_symlinks=False)
            self._problems.tell("SELinux", None)
        except OSError as error:
            text = f"{path} cannot get the label {label.decode()}: {error.strerror}"
            self._problems.tell("SELinux", f"{text}: containers may not use it")


def _label(path: Path) -> bytes:
    """The label of a file; b"" if it has none."""
    try:
        return os.getxattr(path, ATTRIBUTE, follow_symlinks=False).rstrip(b"\0")
    except OSError:
        return b""
