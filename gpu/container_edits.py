"""What a container gets beside its device nodes, as the Container Device Interface has it.

Sources: CDI's SPEC.md ("containerEdits"); OCI runtime specification, "POSIX-platform Hooks".
"""

from collections.abc import Mapping

import msgspec

from gpu.driver_files import SharedFile

TIMEOUT = 20  # seconds, after which a runtime ends a hook and gives the container up


class OciHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook of a runtime, as a CDI file names it."""

    hookName: str = "createRuntime"
    path: str  # of the host
    args: tuple[str, ...]  # the first is the program's name
    timeout: int = TIMEOUT  # seconds


class ContainerEdits(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier adds to a container."""

    files: tuple[SharedFile, ...] = ()
    variables: Mapping[str, str] = {}
    hooks: tuple[OciHook, ...] = ()
