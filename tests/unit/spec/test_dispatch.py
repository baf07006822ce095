"""The protocol without a process: what is called, and what is answered."""

import json

import pytest

from base.interrupts import Terminated
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code
from tests.unit.spec.spoken import CONFIG, Trivial, call, error


@pytest.mark.parametrize("version", VERSIONS)
def test_result_is_in_the_version_of_the_request(version: str) -> None:
    reply = call(config={**CONFIG, "cniVersion": version})
    assert reply.exit_code == 0
    assert json.loads(reply.document)["cniVersion"] == version


@pytest.mark.parametrize("command", ["DEL", "CHECK", "GC", "STATUS"])
def test_other_verbs_answer_nothing(command: str) -> None:
    plugin = Trivial()
    reply = call({"CNI_COMMAND": command}, {**CONFIG, "cniVersion": "1.1.0"}, plugin)
    assert reply == (b"", 0)
    assert [request.command for request in plugin.requests] == [command]


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


def test_cni_error_becomes_the_document() -> None:
    reply = call(plugin=Trivial(CNIError(103, "message", "details")))
    assert error(reply) == {
        "cniVersion": "1.0.0",
        "code": 103,
        "msg": "[podfabric 103] message",
        "details": "details",
    }


def test_details_that_are_empty_are_left_out() -> None:
    assert "details" not in error(call(plugin=Trivial(CNIError(103, "message"))))


def test_unexpected_exception_is_999_with_the_traceback_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = error(call(plugin=Trivial(ZeroDivisionError("boom"))))
    assert document["code"] == Code.INTERNAL
    assert "ZeroDivisionError: boom" in document["msg"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" in captured.err


def test_termination_says_try_again() -> None:
    assert error(call(plugin=Trivial(Terminated())))["code"] == Code.TRY_AGAIN


@pytest.mark.parametrize(
    "failure",
    [
        CNIError(100, "link net1 not found"),
        CNIError(100, "open /x: No such file or directory"),
        CNIError(100, "message", "no such file or directory"),
        CNIError(100, "Not Found", "NOT FOUND"),
        FileNotFoundError(2, "No such file or directory", "/x"),
    ],
    ids=["message", "errno", "details", "case", "unexpected"],
)
def test_failed_del_never_reads_like_a_done_one(failure: Exception) -> None:
    """containerd's go-cni takes these phrases for success."""
    document = error(call({"CNI_COMMAND": "DEL"}, plugin=Trivial(failure)))
    text = f"{document['msg']}; {document.get('details', '')}".lower()
    assert "not found" not in text
    assert "no such file or directory" not in text
    assert document["code"] != 0


def test_other_verbs_keep_the_words() -> None:
    assert error(call(plugin=Trivial(CNIError(100, "x not found"))))["msg"] == (
        "[podfabric 100] x not found"
    )


def test_unreadable_standard_input_is_an_io_failure() -> None:
    def fails() -> bytes:
        raise OSError(9, "Bad file descriptor")

    document = error(call(config=fails))
    assert document["code"] == Code.IO_FAILURE
    assert document["msg"].startswith("[podfabric 5] error reading from stdin: ")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"n1"',
        b'{"name":"n1"}x',
        b'{"name":"n1","x":NaN}',
        b'{"name":"n1","x":Infinity}',
        b'\xef\xbb\xbf{"name":"n1"}',
        b'{"name":5}',
        b'{"name":"n1","x":"\xff"}',
        b'{"name":"n1","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_standard_input_that_is_no_configuration_is_a_decoding_failure(raw: bytes) -> None:
    plugin = Trivial()
    document = error(call(config=raw, plugin=plugin))
    assert document["code"] == Code.DECODING_FAILURE
    assert document["msg"].startswith(
        (
            "[podfabric 6] the network configuration cannot be read as a JSON object: ",
            '[podfabric 6] "name": Expected `str`, got `int`: put it in quotes',
        )
    )
    assert plugin.requests == []


@pytest.mark.parametrize("raw", [b"null", b" null\n", b"{}", b'{"name":""}'])
def test_configuration_without_a_name_is_invalid(raw: bytes) -> None:
    document = error(call(config=raw))
    assert (document["code"], document["msg"]) == (
        Code.INVALID_CONFIG,
        '[podfabric 7] "name" is missing: give the network a name',
    )


@pytest.mark.parametrize("value", ["x", "0", "-1", "nan", "inf", "3601"])
def test_delegate_deadline_must_be_a_number_of_seconds(value: str) -> None:
    document = error(call({"PODFABRIC_DELEGATE_DEADLINE": value}))
    assert document["code"] == Code.INVALID_ENVIRONMENT
    assert "PODFABRIC_DELEGATE_DEADLINE" in document["msg"]


def test_own_namespace_is_refused_before_anything_is_done() -> None:
    for command in ("ADD", "DEL"):
        plugin = Trivial()
        environ = {"CNI_COMMAND": command, "CNI_NETNS": "/proc/self/ns/net"}
        assert error(call(environ, plugin=plugin))["code"] == Code.INVALID_NETNS
        assert plugin.requests == []


@pytest.mark.parametrize("value", ["1", "true", "TrUe"])
def test_own_namespace_may_be_allowed(value: str) -> None:
    environ = {"CNI_NETNS": "/proc/self/ns/net", "CNI_NETNS_OVERRIDE": value}
    assert call(environ).exit_code == 0
