"""The protocol without a process: what is called, and what is answered."""

from base.interrupts import Terminated
from cni.spec.errors import CNIError, Code
from tests.unit.spec.spoken import Trivial, call, error


def test_request_holds_what_the_runtime_sent() -> None:
    plugin = Trivial()
    raw = b'{"name":"n1","cniVersion":"1.0.0","x": [1,  2]}'
    environ = {"CNI_ARGS": "A=B", "CNI_PATH": "/a::/b", "CNI_NETNS_OVERRIDE": "tRuE", "X": "y"}
    call(environ, raw, plugin)
    (request,) = plugin.requests
    assert (request.container_id, request.ifname, request.args) == ("c1", "eth0", "A=B")
    assert (request.network, request.cni_version) == ("n1", "1.0.0")
    assert request.path == ("/a", "/b")
    assert request.netns_override
    assert request.config.raw == raw
    assert request.config.keys["x"] == [1, 2]
    assert request.environ["X"] == "y"


def test_details_that_are_empty_are_left_out() -> None:
    assert "details" not in error(call(plugin=Trivial(CNIError(103, "message"))))


def test_termination_says_try_again() -> None:
    assert error(call(plugin=Trivial(Terminated())))["code"] == Code.TRY_AGAIN


def test_other_verbs_keep_the_words() -> None:
    assert error(call(plugin=Trivial(CNIError(100, "x not found"))))["msg"] == (
        "[podfabric 100] x not found"
    )
