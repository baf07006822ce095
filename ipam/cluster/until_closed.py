"""A client of the API server whose calls can be ended: much may be left to do of one step."""

from typing import Any

from ipam.cluster.api import ClusterApi, Unavailable


class UntilClosed:
    """A ClusterApi whose calls fail once it is closed."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._closed = False

    def close(self) -> None:
        """No call begins any more."""
        self._closed = True

    def __getattr__(self, verb: str) -> Any:  # noqa: ANN401 - a method of the api
        if self._closed:
            raise Unavailable("not asked, since this agent is being replaced")
        return getattr(self._api, verb)
