"""`"rails": "all"`: one ADD for several interfaces, and what DEL, CHECK and GC see of it."""

import json
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from cni.attachments import results
from cni.attachments.journal import JournalEntry, Phase
from cni.attachments.orphans import sweep_all
from cni.attachments.rail_plugin import Complete, RailPlugin
from cni.spec import rail_keys
from cni.spec.attachment import Attachment
from cni.spec.dispatch import answer
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from cni.spec.result import Interface, Result
from ipam.plugin import AddressPlugin
from ipam.store.sqlite_store import SqliteStore
from ipam.store_choice import Stores
from tests.kernel.processes import killed_at
from tests.unit.attachments.choosing import CNI_ARGS, POD
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers

HCAS = servers.DGX_HCAS[:4]
NETNS = "/proc/self/ns/net"
NAMES = ["net1", "net1-1", "net1-2", "net1-3"]
RANGES = [{"range": f"10.0.{number}.0/24", "gateway": f"10.0.{number}.1"} for number in range(4)]
IPAM = {"type": "podfabric-ipam", "rails": RANGES}


class Made(RailPlugin):
    """A plugin with a list in place of the kernel: (interface, HCA), in the order of the ADDs."""

    name: ClassVar = "made"
    masters: ClassVar = ("auto",)
    made: ClassVar[list[tuple[str, str]]] = []
    failing: ClassVar[str] = ""  # the HCA whose ADD fails
    stuck: ClassVar[str] = ""  # the interface that cannot be removed

    def attach(self, request: Request, complete: Complete) -> dict[str, Any]:
        ipam, allowance = self._ipam_of_add(request, self._allowance(request))
        attachment, hca = Attachment.of(request), str(request.config.keys["deviceID"])
        boot_id, pod = self.paths.boot_id(), request.arguments.pod
        self._settle_earlier_attempt(attachment, request)
        entry = JournalEntry.begun(self.name, request, None, boot_id, Interface(""), pod, hca)
        self.journal.write(entry)
        if hca == self.failing:
            self.journal.remove(attachment)
            raise CNIError(Code.TRY_AGAIN, f"{hca} has no carrier")
        answer = Result() if ipam is None else ipam.add("", allowance)
        self.made.append((request.ifname, hca))
        complete(entry.attached(Interface(""), [ip.address for ip in answer.ips]))
        shown = Interface(request.ifname, sandbox=request.netns, pciID=hca)
        return results.document(request, shown, answer, answer.dns)

    def detach(self, attachment: Attachment, request: Request, entry: JournalEntry | None) -> None:
        if attachment.ifname == self.stuck:
            raise OSError(16, "busy", attachment.ifname)
        self.made[:] = [each for each in self.made if each[0] != attachment.ifname]

    def adopt(self, attachment: Attachment, request: Request) -> None:
        return None

    def compare(self, attachment: Attachment, request: Request) -> None:
        expected = results.expected(request)
        made = dict(self.made).get(request.ifname, "nothing")
        results.compare(request.ifname, {"HCA": (made, expected.interface.pciID)})

    def require_ready(self, request: Request) -> None:
        assert "rails" not in request.config.keys


class PodWithRails:
    """A pod with four HCAs, and calls as a runtime makes them."""

    def __init__(self, server: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.paths = msgspec.structs.replace(server.paths, proc=Path("/proc"))
        for name, value in (("made", []), ("failing", ""), ("stuck", "")):
            monkeypatch.setattr(Made, name, value)
        stores = Stores(self.paths.ipam)
        self.addresses = AddressPlugin(stores, self.paths.boot_id)
        self.plugin = Made(self.paths, self.addresses)

    def call(self, command: str, ifname: str = "net1", **config: Any) -> dict[str, Any]:  # noqa: ANN401
        """One call. Returns the document, {} if there is none."""
        environ = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": "c1",
            "CNI_NETNS": NETNS,
            "CNI_IFNAME": ifname,
            "CNI_ARGS": config.pop("cni_args", CNI_ARGS),
            "CNI_PATH": "/opt/cni/bin",
            "CNI_NETNS_OVERRIDE": "1",
        }
        least = {"cniVersion": "1.1.0", "name": "fabric", "type": "made", "rails": "all"}
        stdin = json.dumps(least | config).encode()
        reply = answer(lambda: self.plugin, environ, lambda: stdin)
        document: dict[str, Any] = json.loads(reply.document or b"{}")
        return document

    def reserved(self) -> dict[str, str]:
        """The reserved address of each interface."""
        if not self.paths.ipam.exists():
            return {}
        held = SqliteStore(self.paths.ipam, self.paths.boot_id()).reservations()
        return {each.ifname: each.address for each in held}

    def entries(self) -> list[JournalEntry]:
        found = list(self.plugin.journal.entries())
        assert all(isinstance(entry, JournalEntry) for entry in found)
        return [entry for entry in found if isinstance(entry, JournalEntry)]

    def nothing_is_left(self) -> bool:
        files = [path for path in self.paths.attachments.rglob("*") if path.is_file()]
        return not (files or Made.made or self.reserved())


@pytest.fixture
def rails(server: Holding, monkeypatch: pytest.MonkeyPatch) -> PodWithRails:
    server.give(POD, {f"{hca}-0": [hca] for hca in reversed(HCAS)})
    return PodWithRails(server, monkeypatch)


def test_one_add_attaches_an_interface_on_each_hca_in_order(rails: PodWithRails) -> None:
    made = rails.call("ADD", ipam=IPAM | {"routes": [{"dst": "10.9.0.0/16"}]})
    assert [(each["name"], each["pciID"]) for each in made["interfaces"]] == list(
        zip(NAMES, HCAS, strict=True)
    )
    addresses = [(ip["address"], ip["interface"]) for ip in made["ips"]]
    assert addresses == [(f"10.0.{number}.2/24", number) for number in range(4)]
    assert len(made["routes"]) == 4
    assert {each.rail_of for each in rails.entries()} == {"net1"}
    assert {each.phase for each in rails.entries()} == {Phase.ATTACHED}
    assert sorted(rails.reserved()) == NAMES
    assert rails.call("CHECK", ipam=IPAM, prevResult=made) == {}
    assert rails.call("ADD", ipam=IPAM)["interfaces"] == made["interfaces"]  # the pod was dead
    assert [name for name, _ in Made.made] == NAMES
    assert rails.call("DEL", ipam=IPAM) == {}
    assert rails.nothing_is_left()
    assert rails.call("DEL", ipam=IPAM) == {}


def test_earlier_result_stays_in_front(rails: PodWithRails) -> None:
    earlier = {"cniVersion": "1.1.0", "interfaces": [{"name": "a"}, {"name": "b"}]}
    made = rails.call("ADD", prevResult=earlier, ipam=IPAM)
    assert [each["name"] for each in made["interfaces"]] == ["a", "b", *NAMES]
    assert [ip["interface"] for ip in made["ips"]] == [2, 3, 4, 5]


def test_without_rails_a_journal_entry_and_an_add_are_as_before(rails: PodWithRails) -> None:
    rails.call("ADD", rails=None, deviceID=HCAS[0])
    (entry,) = rails.entries()
    assert (entry.rail_of, Made.made) == ("", [("net1", HCAS[0])])
    earlier = json.loads(msgspec.json.encode(entry))
    del earlier["rail_of"]
    assert msgspec.json.decode(json.dumps(earlier), type=JournalEntry).rail_of == ""
    assert rails.call("DEL", rails=None) == {}
    assert rails.nothing_is_left()


@pytest.mark.parametrize("number", range(4))
def test_failed_rail_undoes_all(rails: PodWithRails, number: int) -> None:
    Made.failing = HCAS[number]
    error = rails.call("ADD", ipam=IPAM)
    assert error["code"] == Code.TRY_AGAIN
    assert "has no carrier" in error["msg"]
    assert rails.nothing_is_left()
    assert rails.call("DEL", ipam=IPAM) == {}


def test_failed_undo_leaves_the_rest_to_del(rails: PodWithRails) -> None:
    Made.failing, Made.stuck = HCAS[3], "net1-1"
    assert rails.call("ADD", ipam=IPAM)["code"] == Code.TRY_AGAIN
    assert sorted(name for name, _ in Made.made) == ["net1", "net1-1"]
    error = rails.call("DEL", ipam=IPAM)
    assert error["code"] == Code.CLEANUP_INCOMPLETE
    assert [name for name, _ in Made.made] == ["net1-1"]
    assert list(rails.reserved()) == ["net1-1"]
    Made.stuck = ""
    assert rails.call("DEL", ipam=IPAM) == {}
    assert rails.nothing_is_left()


@pytest.mark.parametrize("damaged", NAMES)
def test_del_removes_a_rail_with_a_damaged_file(rails: PodWithRails, damaged: str) -> None:
    rails.call("ADD", ipam=IPAM)
    rails.plugin.journal.path_of(Attachment("fabric", "c1", damaged)).write_bytes(b"torn")
    valid: dict[str, Any] = {"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "net1"}]}
    rails.call("GC", ipam=IPAM, **valid)
    assert sorted(rails.reserved()) == NAMES
    assert rails.call("DEL", ipam=IPAM) == {}
    assert (Made.made, rails.reserved(), rails.entries()) == ([], {}, [])


def test_gc_keeps_and_removes_the_rails_with_their_first_interface(rails: PodWithRails) -> None:
    rails.call("ADD", ipam=IPAM)
    for key in ("cni.dev/valid-attachments", "cni.dev/attachments"):
        kept: dict[str, Any] = {key: [{"containerID": "c1", "ifname": "net1"}]}
        assert rails.call("GC", ipam=IPAM, **kept) == {}
        assert (len(Made.made), sorted(rails.reserved())) == (4, NAMES)
    gone: dict[str, Any] = {"cni.dev/valid-attachments": [{"containerID": "c2", "ifname": "net1"}]}
    assert rails.call("GC", ipam=IPAM, **gone) == {}
    assert rails.nothing_is_left()


def test_sweep_removes_the_rails_of_a_killed_add_and_of_a_dead_pod(rails: PodWithRails) -> None:
    rails.call("ADD", ipam=IPAM)  # its entries name no namespace: the pod is gone
    swept = sweep_all(rails.addresses, rails.plugin)
    assert len([outcome for outcome in swept if outcome.removed]) == 4
    assert rails.nothing_is_left()


def test_check_compares_each_rail(rails: PodWithRails) -> None:
    made = rails.call("ADD", ipam=IPAM)
    Made.made[2] = ("net1-2", "another")
    assert "HCA of net1-2" in rails.call("CHECK", ipam=IPAM, prevResult=made)["msg"]
    Made.made[2] = ("net1-2", HCAS[2])
    store = SqliteStore(rails.paths.ipam, rails.paths.boot_id())
    store.release(Attachment("fabric", "c1", "net1-3"))
    assert "10.0.3.2 is not reserved" in rails.call("CHECK", ipam=IPAM, prevResult=made)["msg"]
    shorter = made | {"interfaces": made["interfaces"][:3]}
    error = rails.call("CHECK", ipam=IPAM, prevResult=shorter)
    assert error["msg"].endswith('prevResult has no interface "net1-3" in a sandbox')
    rails.plugin.journal.remove(Attachment("fabric", "c1", "net1-1"))
    error = rails.call("CHECK", ipam=IPAM, prevResult=made)
    assert (error["code"], "no entry" in error["msg"]) == (Code.CHECK_FAILED, True)


def test_rails_share_a_range_without_ranges_of_their_own(rails: PodWithRails) -> None:
    one = {"type": "podfabric-ipam", "range": "10.7.0.0/24"}
    made = rails.call("ADD", ipam=one)
    addresses = [ip["address"] for ip in made["ips"]]
    assert addresses == [f"10.7.0.{number}/24" for number in (1, 2, 3, 4)]
    assert rails.call("CHECK", ipam=one, prevResult=made) == {}


def test_configured_rail_chooses_the_range(
    server: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.give(POD, {"0": HCAS[:2]}, rails={HCAS[0]: 3, HCAS[1]: 1})
    rails = PodWithRails(server, monkeypatch)
    made = rails.call("ADD", ipam=IPAM)
    assert [ip["address"] for ip in made["ips"]] == ["10.0.1.2/24", "10.0.3.2/24"]
    assert [each["pciID"] for each in made["interfaces"]] == [HCAS[1], HCAS[0]]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"rails": "some"}, '"rails": \'some\' is not "all"'),
        ({"rails": 4}, '"rails": 4 is not "all"'),
        ({"master": "ib0"}, '"master" is for one interface'),
        ({"deviceID": HCAS[0]}, '"deviceID" is for one interface'),
        ({"runtimeConfig": {"deviceID": HCAS[0]}}, '"runtimeConfig.deviceID" is for one'),
        ({"runtimeConfig": {"ips": ["10.0.0.9/24"]}}, '"runtimeConfig.ips" is for one'),
        ({"args": {"cni": {"guid": "02:00"}}}, '"args.cni.guid" is for one'),
        ({"cni_args": f"{CNI_ARGS};MAC=02:00:00:00:00:01"}, '"CNI_ARGS MAC" is for one'),
        ({"cniVersion": "0.2.0"}, '"rails" needs several interfaces'),
        ({"ipam": IPAM | {"rails": RANGES[:3]}}, '"ipam.rails" has 3 entries, but HCA'),
        ({"ipam": IPAM | {"rails": RANGES[:1]}}, '"ipam.rails" has 1 entries, but HCA'),
        ({"ipam": IPAM | {"rails": []}}, '"ipam.rails" is empty'),
        ({"ipam": IPAM | {"rails": "no"}}, '"ipam.rails": Expected array'),
        ({"ifname": "a-name-of-fourteen"[:14]}, "longer than 15 characters"),
        ({"cni_args": CNI_ARGS.replace("worker-0", "w").replace("uid-0", "u")}, "was given no HCA"),
        ({"cni_args": ""}, '"rails": "all" needs to know the pod'),
    ],
)
def test_refused_before_anything_is_made(
    rails: PodWithRails, config: dict[str, Any], error: str
) -> None:
    given = {"ipam": IPAM} | config
    assert error in rails.call("ADD", **given)["msg"]
    assert not list(Path(rails.paths.attachments).glob("*"))
    assert rails.nothing_is_left()
    assert rails.call("DEL", **given) == {}


def test_status_asks_for_the_addresses_of_each_rail(rails: PodWithRails) -> None:
    assert rails.call("STATUS", ipam=IPAM) == {}
    small = [*RANGES[:3], {"range": "10.0.3.0/30", "exclude": ["10.0.3.0/30"]}]
    error = rails.call("STATUS", ipam=IPAM | {"rails": small})
    assert error["code"] == Code.UNAVAILABLE
    assert 'is not "all"' in rails.call("STATUS", rails="some")["msg"]


def test_add_killed_at_every_step_leaves_no_file_after_del(rails: PodWithRails) -> None:
    for step in range(1, 1000):
        killed = killed_at(step, lambda: rails.call("ADD", ipam=IPAM))
        assert rails.call("DEL", ipam=IPAM) == {}
        left = [path for path in rails.paths.state.rglob("*") if "net1" in path.name]
        assert (step, left, rails.reserved()) == (step, [], {})
        if not killed:
            assert step > 30
            return
    raise AssertionError("there are more changes than are enough")


def test_number_of_entries_is_limited() -> None:
    """Each entry repeats the other keys: a small definition must not need much memory."""
    entries: list[dict[str, str]] = [{} for _ in range(rail_keys.MOST + 1)]
    with pytest.raises(CNIError, match=r'"ipam\.rails" has 33 entries: write at most 32'):
        rail_keys.addresses({"range": "10.0.0.0/24", "rails": entries})
    assert len(rail_keys.addresses({"rails": entries[1:]})) == rail_keys.MOST
