"""The files that a process for one call works on, which must be those of the node's agent.

`podfabric install --fallback` writes an installation beside the fallback's scripts: where the
node's files are, and the identity of the state directory. A fallback uses only that. It does
nothing unless it is sure that the agent works on the same state:

- The state directory exists and has the identity that was installed.
- The launcher looked for the agent of this installation, which has the same locks as the fallback.
- In this boot, agent and fallback have worked on the same state directory. The first of them
  records which (`claim`), beside the agent's socket. No attachment outlives the boot.
"""

import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from base import decoding, files
from base.paths import Paths
from cni.spec import launcher
from cni.spec.errors import CNIError, Code

MARK = "podfabric fallback"
NAME = "installation.json"
DEVELOPMENT = "development"
_SCRIPTS = ".podfabric"  # the directory of fallbacks: cli/executables.py
_IDENTITY = "identity"
_AGAIN = "run `podfabric install --fallback` again, with the agent's environment"


class Installation(msgspec.Struct, frozen=True):
    """Content of the file: the roots by the names of `Paths`, the state directory's identity."""

    made_for: str
    roots: dict[str, str]
    state_identity: str


class Claim(msgspec.Struct, frozen=True):
    """The state directory that agent and fallback use in this boot."""

    state: str
    identity: str


class OtherState(Exception):
    """This may not be the node's state directory. The text says why."""


def describe(paths: Paths) -> bytes:
    """The content of an installation's file. Makes the state directory if it is missing."""
    roots = {name: str(root.absolute()) for name, root in msgspec.structs.asdict(paths).items()}
    installation = Installation(MARK, roots, identify(paths.state))
    return msgspec.json.format(msgspec.json.encode(installation)) + b"\n"


def paths_of(script: str, environ: os._Environ[str], arguments: Sequence[str]) -> Paths:
    """The node's files for the fallback `script` of an installation; CNIError 114 if unsure.

    For a script for development (DEVELOPMENT) or an executable of a Python environment (""),
    `environ` says where they are.
    """
    if script == "" and Path(sys.argv[0]).parent.name == _SCRIPTS:
        raise CNIError(
            Code.OTHER_STATE,
            f"the fallback {sys.argv[0]} was installed by an older podfabric: nothing was done; "
            f"{_AGAIN}",
        )
    if script in ("", DEVELOPMENT):
        return Paths.from_environ(environ)
    path = Path(script).with_name(NAME)
    try:
        installation = decoding.decode(path.read_bytes(), Installation)
        paths = Paths(**{name: Path(root) for name, root in installation.roots.items()})
        _require_same(installation, paths, launcher.read(arguments).socket)
        claim(paths, installation.state_identity)
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise CNIError(
            Code.OTHER_STATE,
            f"the fallback cannot tell which state directory is the node's: {path}: {error}: "
            f"nothing was done; start the agent, or {_AGAIN}",
        ) from None
    except OtherState as other:
        raise CNIError(Code.OTHER_STATE, f"{other}: nothing was done; {_AGAIN}") from None
    return paths


def identify(state: Path) -> str:
    """The identity of a state directory, made if it is missing. Raises OSError, OtherState."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.create(state / _IDENTITY, f"{uuid.uuid4().hex}\n".encode())
    return _identity_of(state)


def remove_identity(state: Path) -> None:
    """Remove what `identify` made, also after it was killed. Raises OSError."""
    for path in (state / _IDENTITY, *state.glob(f".{_IDENTITY}.*")):
        path.unlink(missing_ok=True)


def claim(paths: Paths, identity: str) -> None:
    """Record that agent and fallback use this state directory in this boot.

    Raises OtherState if they have used a different one, OSError.
    """
    path = paths.run / f"state-{paths.boot_id()}.json"
    paths.run.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        for earlier in set(paths.run.glob("state-*.json")) - {path}:  # of another boot
            earlier.unlink(missing_ok=True)
        files.create(path, msgspec.json.encode(Claim(str(paths.state), identity)))
        content = path.read_bytes()
    try:
        first = decoding.decode(content, Claim)
    except msgspec.MsgspecError as error:
        raise OtherState(
            f"{path} should say which state directory the pods of this boot are recorded in, and "
            f"cannot be read: {error}"
        ) from None
    if first.identity != identity:
        raise OtherState(
            f"the pods of this boot are recorded in the state directory {first.state}, which is "
            f"another one than {paths.state} (so says {path})"
        )


def _require_same(installation: Installation, paths: Paths, socket: str) -> None:
    if socket and os.path.realpath(Path(socket).parent) != os.path.realpath(paths.run):
        raise OtherState(
            f"the launcher looked for an agent at {socket}, and the fallback was installed for "
            f"the agent at {paths.agent_socket}"
        )
    try:
        identity = _identity_of(paths.state)
    except FileNotFoundError:
        identity = ""
    if identity != installation.state_identity:
        what = "another one" if identity else "missing, empty or not mounted"
        raise OtherState(
            f"the state directory {paths.state} is {what}: the fallback was installed for the "
            f"one with the identity {installation.state_identity}"
        )


def _identity_of(state: Path) -> str:
    identity = (state / _IDENTITY).read_text().strip()
    if not identity:
        raise OtherState(f"{state / _IDENTITY} is empty, so the state directory may be any")
    return identity
