"""Waiting for an interface that has been set up to be able to carry frames."""

import time

from base import interrupts
from host import links
from host.errors import LinkMissing
from host.links import Link
from host.netlink import Rtnetlink


def awaited(pod: Rtnetlink, link: Link, seconds: float) -> Link:
    """The interface as soon as it has carrier, or as it is when the time is over."""
    deadline = time.monotonic() + seconds
    pause = 0.002
    while not link.carrier and time.monotonic() < deadline:
        interrupts.checkpoint()
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
        now = links.by_index(pod, link.index)
        if now is None:
            raise LinkMissing(f'"{link.name}" has gone from the pod while it was configured')
        link = now
    return link
