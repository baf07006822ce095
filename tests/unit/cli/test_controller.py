"""`podfabric controller`, as far as it needs no API server."""

import argparse
import socket
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from base import decoding
from cli import controller
from ipam.controller.leader import ControllerProcess
from kube import transport
from tests.fake_api import FakeApi, FakeClient


class Client(FakeClient):
    def close(self) -> None:
        """Nothing is open."""


def test_decoders_are_built_before_the_first_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that decode a type for the first time crash the process."""
    order: list[str] = []
    server = FakeApi()

    def client(*_: Any, **__: Any) -> Client:  # noqa: ANN401
        order.append("client")
        return Client(server, "only")

    monkeypatch.setattr(transport, "KubernetesApi", client)
    monkeypatch.setattr(decoding, "build_decoders", lambda: order.append("built"))
    monkeypatch.setattr(ControllerProcess, "run", lambda self: order.append("threads"))
    parser = argparse.ArgumentParser()
    controller.add_arguments(parser)
    with ExitStack() as stack:
        controller._serve(parser.parse_args(["--metrics", ""]), SimpleQueue(), stack)
    assert order == ["built", "client", "client", "threads"]


def test_an_address_in_use_is_an_error_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "KubernetesApi", lambda *_, **__: Client(FakeApi(), "only"))
    parser = argparse.ArgumentParser()
    controller.add_arguments(parser)
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as stack:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = f"cannot listen at {address}: Address already in use: free the address, or set --met"
        with pytest.raises(OSError, match=text):
            controller._serve(parser.parse_args(["--metrics", address]), SimpleQueue(), stack)
