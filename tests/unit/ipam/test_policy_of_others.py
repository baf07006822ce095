"""Rules for other IPAM plugins: their type, their paths, and the addresses that they answer."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from base.pod import Pod
from cni.spec.request import Request
from ipam.delegation import Delegation, IpamCall
from policy.allowance import NotAllowed, of_pod
from policy.document import rules_of
from policy.rules import Policy
from tests.unit.ipam.calls import Calls, error_of, request
from tests.unit.ipam.test_delegation import RESULT, calls_of, executable

pytestmark = pytest.mark.root

TYPE = "elsewhere"  # its RESULT has 10.7.0.1/24


def policy(*, subjects: str = "ns", **more: Any) -> Policy:  # noqa: ANN401
    use = {"ipamTypes": [TYPE], "ranges": more.pop("ranges", ["10.7.0.0/16"])}
    rule = {"name": "r", "subjects": [{"namespaces": [subjects]}], "use": use, **more}
    return Policy(rules=rules_of([rule], "rules"))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / TYPE
    executable(path, RESULT)
    return path


def asked(command: str, **options: object) -> Request:
    given = request(command, {"type": TYPE, **options}, "c1", pod="p")
    return msgspec.structs.replace(given, environ={"PATH": "/bin", "CNI_COMMAND": command})


def added(node: Calls, program: Path, rules: Policy, **options: object) -> IpamCall:
    """The plugin of an ADD, which has not run yet."""
    delegation = Delegation(node.plugin, program.parent, lambda: rules)
    call, _ = delegation.of_add(asked("ADD", **options), of_pod(rules, Pod("ns", "p")))
    assert call is not None
    return call


def test_answer_within_the_ranges_is_taken(node: Calls, program: Path) -> None:
    rules = policy()
    result = added(node, program, rules).add("", of_pod(rules, Pod("ns", "p")))
    assert [ip.address for ip in result.ips] == ["10.7.0.1/24"]
    assert calls_of(program) == ["ADD"]


@pytest.mark.parametrize("use", [{"ranges": ["10.8.0.0/16"]}, {"ranges": []}])
def test_answer_that_no_rule_has_is_released_and_refused(
    node: Calls, program: Path, use: dict[str, Any]
) -> None:
    rules = policy(**use)
    call = added(node, program, rules)
    error = error_of(lambda: call.add("", of_pod(rules, Pod("ns", "p"))))
    assert isinstance(error, NotAllowed)
    assert (error.key, error.value) == (f"ipam ({TYPE})", "10.7.0.1")
    assert calls_of(program) == ["ADD", "DEL"]


def test_status_runs_what_some_pod_may_have(node: Calls, program: Path) -> None:
    rules = policy()
    call = Delegation(node.plugin, program.parent, lambda: rules).of(asked("STATUS"))
    assert call is not None
    call.status()
    refused = Delegation(node.plugin, program.parent, Policy)
    assert error_of(lambda: refused.of(asked("STATUS"))).code == 121
