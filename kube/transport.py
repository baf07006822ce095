"""Sends requests to the API server with the official client of Kubernetes.

This is the only module that imports the package `kubernetes`, which costs a process 20 MB. Import
this module only where a process needs the API server.
"""

import logging
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import OpenApiException
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from urllib3 import HTTPResponse
from urllib3.exceptions import HTTPError, ReadTimeoutError

from kube.client import ClusterApi
from kube.encoding import JSON, JSON_PATCH, MERGE_PATCH
from kube.requests import TIMEOUT, AnswerTooLarge, Lines, Pace, Query, Response, RestRequest
from kube.resources import Refused, Unavailable

CONNECT, READ = 2.0, 5.0  # seconds to wait for a connection, and for the next bytes
SILENCE = 90.0  # seconds without a line, after which a watch is dead; a bookmark comes each minute
CONNECTIONS = 8  # connections that are kept open
_LOOK_AT_TOKEN = 10.0  # seconds between two reads of the token

_log = logging.getLogger(__name__)


class KubernetesApi(ClusterApi):
    """A client of this pod's cluster or a kubeconfig's. Raises Refused without a cluster."""

    def __init__(
        self,
        kubeconfig: Path | None = None,
        *,
        writer: str = "podfabric",
        node: str = "",
        timeout: float = TIMEOUT,
        pace: Pace | None = None,
    ) -> None:
        self._client = _Client(kubeconfig, writer)
        super().__init__(self._client, writer=writer, node=node, timeout=timeout, pace=pace)

    def close(self) -> None:
        self._client.close()


class _Client:
    """The Transport of `KubernetesApi`."""

    def __init__(self, kubeconfig: Path | None, user_agent: str) -> None:
        self._kubeconfig = kubeconfig
        configuration = Configuration()
        # Otherwise urllib3 would repeat a PUT or DELETE that the server has already executed.
        configuration.retries = False
        configuration.connection_pool_maxsize = CONNECTIONS
        configuration.keep_alive = True
        self._configure(configuration)
        self._client = ApiClient(configuration)
        self._client.user_agent = user_agent
        self._identify_at = 0.0

    def close(self) -> None:
        self._client.close()

    def send(self, request: RestRequest, patience: float, most: int = 0) -> Response:
        deadline = time.monotonic() + patience
        # A patch of a large object takes seconds, and the server may stop if the client hangs up.
        read = patience if request.method == "PATCH" else min(READ, patience)
        limits = (min(CONNECT, patience), read)
        response = self._open(request, limits)
        if response.status == HTTPStatus.UNAUTHORIZED:
            # The server did nothing. The token may have changed.
            _body(response, deadline)
            self._configure(self._client.configuration)
            self._identify_at = 0.0
            response = self._open(request, limits)
        asked = response.headers.get("Retry-After", "")
        retry_after = float(asked) if asked.isdecimal() else 0
        return Response(response.status, _body(response, deadline, most), retry_after)

    def follow(self, where: str, query: Query) -> Lines:
        response = self._open(RestRequest("GET", where, query), (CONNECT, SILENCE))
        if response.status != HTTPStatus.OK:
            return Lines(response.status, iter([_body(response, time.monotonic() + READ)]))
        return Lines(response.status, _lines(response))

    def _configure(self, configuration: Configuration) -> None:
        """Read the server's address and the token. Raises Refused."""
        try:
            if self._kubeconfig is None:
                load_incluster_config(client_configuration=configuration)
            else:
                load_kube_config(
                    str(self._kubeconfig), client_configuration=configuration, persist_config=False
                )
        except Exception as error:  # YAMLError, TypeError, ... for a file that is not a kubeconfig
            where = f"in {self._kubeconfig}" if self._kubeconfig else "in this pod"
            raise Refused(f"no API server {where}: {error}") from error

    def _identify(self) -> None:
        """Set the token in the headers. The package reads a service account's token each minute.

        The package's `auth_settings` would take a fifth of the CPU time of a request.
        """
        now = time.monotonic()
        if now >= self._identify_at:
            headers = self._client.default_headers
            self._client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
            self._identify_at = now + _LOOK_AT_TOKEN

    def _open(self, request: RestRequest, limits: tuple[float, float]) -> HTTPResponse:
        headers = {"Accept": request.accept}
        if request.body is not None:
            patch = JSON_PATCH if isinstance(request.body, list) else MERGE_PATCH
            headers["Content-Type"] = patch if request.method == "PATCH" else JSON
        try:
            self._identify()
            method, url, headers, body, _ = self._client.param_serialize(
                request.method,
                request.where,
                query_params=request.query,
                header_params=headers,
                body=request.body,
            )
            answer = self._client.call_api(method, url, headers, body, _request_timeout=limits)
        except (HTTPError, OpenApiException, ConfigException, OSError) as error:
            raise Unavailable(f"no answer from the API server: {error}") from error
        response: HTTPResponse = answer.response
        return response


def _body(response: HTTPResponse, deadline: float, most: int = 0) -> bytes:
    """Read the whole body. Returns a complete body even if it is late. Raises AnswerTooLarge."""
    parts: list[bytes] = []
    size, is_late = 0, False
    try:
        for part in response.stream(1 << 16):
            if is_late:
                raise TimeoutError("the answer comes too slowly")
            parts.append(part)
            size += len(part)
            if most and size > most:
                response.close()
                raise AnswerTooLarge(f"the answer has more than {most} bytes")
            is_late = time.monotonic() > deadline
    except (HTTPError, OSError) as error:
        response.close()
        raise Unavailable(f"the API server's answer was cut off: {error}") from error
    response.release_conn()
    return b"".join(parts)


def _lines(response: HTTPResponse) -> Iterator[bytes]:
    """Yield each complete line as it comes. Raises Unavailable after SILENCE."""
    rest = b""
    try:
        for part in response.stream(None):
            *lines, rest = (rest + part).split(b"\n")
            yield from filter(None, lines)
    except ReadTimeoutError as error:
        raise Unavailable(f"a watch received nothing for {SILENCE:g} s: {error}") from error
    except (HTTPError, OSError) as error:
        _log.debug("a watch ended: %s", error)
    finally:
        response.close()
