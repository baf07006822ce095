"""To which nodes' names pods are bound, asked sparingly.

Many nodes may go at once, and each is a request. A node not asked yet counts as having pods.
"""

from collections.abc import Callable

import msgspec

from ipam.cluster.api import ApiError, ClusterApi

LOOK_EVERY = 10.0  # seconds between two looks for the pods of one name, if there are few
MOST_LOOKS = 40  # of a round: two seconds of a client's requests
MOST_FAILURES = 3  # of a round: each may take as long as a request


class _Look(msgspec.Struct, frozen=True):
    """An answer and when it was asked for."""

    has_pods: bool
    time: float


class BoundPods:
    """The answers that one leader remembers. `begin` begins a round."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._looks: dict[str, _Look] = {}
        self._asked: dict[str, _Look] = {}
        self._left = MOST_LOOKS
        self._failures = 0

    def begin(self) -> None:
        """Allow further looks, and forget the names that the last round did not ask for."""
        self._looks, self._asked = self._asked, {}
        self._left = MOST_LOOKS
        self._failures = 0

    def on(self, node: str) -> bool:
        """Whether pods are bound to the name, as of some seconds ago. ApiError."""
        look = self._looks.get(node)
        now = self._clock()
        # The more names, the less often for each: so those that come last have their turn, too.
        pause = LOOK_EVERY * (1 + len(self._looks) / MOST_LOOKS)
        if (look is None or now - look.time >= pause) and self._left > 0:
            self._left -= 1
            try:
                look = _Look(self._api.has_pods(node), now)
            except ApiError:
                self._failures += 1
                if self._failures == MOST_FAILURES:
                    self._left = 0
                # The round may end here: the names that it has not come to are not forgotten.
                self._asked = self._looks | self._asked
                raise
        if look is None:
            return True
        self._asked[node] = look
        return look.has_pods
