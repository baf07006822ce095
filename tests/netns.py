"""Network namespaces with unique names, and ip(8)."""

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NETNS = Path("/var/run/netns")
IP = "/usr/sbin/ip"  # the full path, because a busybox shell has its own ip


def ip(*arguments: str) -> str:
    """Run ip(8); its standard output."""
    done = subprocess.run([IP, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@contextmanager
def namespace() -> Iterator[Path]:
    """A network namespace. The test may delete it."""
    name = f"pf-{uuid.uuid4().hex[:10]}"
    ip("netns", "add", name)
    try:
        yield NETNS / name
    finally:
        if (NETNS / name).exists():
            ip("netns", "delete", name)
