"""Objects that tenants and nodes write: none of them hides another, or fills the memory."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from ipam.leases.objects import AddressBlock
from kube import encoding
from kube.client import ClusterApi
from kube.encoding import document
from kube.informer import Mirror, all_nodes, same
from kube.requests import AnswerTooLarge, Lines, Query, Response, RestRequest
from kube.resources import Change, Meta, Unavailable
from tests.unit.kube.contract import block
from tests.waiting import until

DEPTH = 5000
DEEP = "@deep@"  # in a document: a list of lists
FAT = {f"label-{number}": "x" * 60 for number in range(400)}


class Canned:
    """A Transport that gives its answers one after the other, the last again and again."""

    def __init__(self, *answers: object) -> None:
        self.answers = [each if isinstance(each, bytes) else written(each) for each in answers]
        self.queries: list[dict[str, str]] = []

    def send(self, request: RestRequest, patience: float, most: int = 0) -> Response:
        self.queries.append(dict(request.query))
        return Response(200, self._next())

    def follow(self, where: str, query: Query) -> Lines:
        return Lines(200, iter(self._next().splitlines()))

    def _next(self) -> bytes:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def written(value: object) -> bytes:
    return json.dumps(value).replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH).encode()


def stored(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """A block's document as a server has it, with other metadata or, as `spec`, no block's spec."""
    found = document(block())
    meta = {"uid": "u", "resourceVersion": "7", "namespace": ""} | changes
    spec = meta.pop("spec", found["spec"])
    return {**found, "metadata": found["metadata"] | meta, "spec": spec}


def page(*items: object, further: str = "") -> dict[str, Any]:
    metadata = {"resourceVersion": "9"} | ({"continue": further} if further else {})
    return {"metadata": metadata, "items": items}


def name_of(each: Any) -> str:  # noqa: ANN401 - a document
    named: str = each["metadata"]["name"]
    return named


@pytest.mark.parametrize("spec", [DEEP, 7, {"pool": DEEP}, {"pool": 7}, None], ids=str)
def test_an_object_of_a_list_that_cannot_be_read_is_named_and_hides_no_other(spec: object) -> None:
    well, bad, last = stored(), stored(spec=spec), stored(managedFields=[DEEP])
    api = ClusterApi(Canned(page(well, bad, last), page(well, last)))
    listing = api.list(AddressBlock)
    assert [each.metadata.name for each in listing.items] == [name_of(well), name_of(last)]
    (unreadable,) = listing.unreadable
    assert (unreadable.kind, unreadable.metadata.name) == ("AddressBlock", name_of(bad))
    assert (unreadable.metadata.uid, unreadable.metadata.resource_version) == ("u", "7")
    assert api.unreadable() == (unreadable,)
    api.list(AddressBlock)
    assert api.unreadable() == ()


def test_a_watch_goes_on_after_what_cannot_be_read() -> None:
    well, bad = stored(managedFields=[DEEP]), stored(spec=DEEP)
    mended = {**stored(), "metadata": bad["metadata"]}
    lines = [("ADDED", bad), ("ADDED", well), ("MODIFIED", mended)]
    events = b"\n".join(written({"type": type_, "object": each}) for type_, each in lines)
    api = ClusterApi(Canned(events))
    changes: Iterator[Change[AddressBlock]] = api.watch(AddressBlock, "1")
    assert next(changes).object.metadata.name == name_of(well)
    assert [each.metadata.name for each in api.unreadable()] == [name_of(bad)]
    assert next(changes).object.metadata.name == name_of(bad)
    assert api.unreadable() == ()


def test_a_mirror_keeps_what_cannot_be_read_any_more_as_it_was() -> None:
    before = stored()
    after = {**before, "spec": 7}
    expired = {"type": "ERROR", "object": {"code": 410}}
    transport = Canned(page(before, stored()), expired, page(after), b"")
    changes: list[None] = []
    mirror = Mirror(ClusterApi(transport), AddressBlock, same, lambda: changes.append(None))
    try:
        until(lambda: len(changes) == 2, what="second list")
        (kept,) = mirror.items() or ()
        assert kept.metadata.name == name_of(before)
    finally:
        mirror.close()


def test_a_page_of_large_objects_has_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST_PAGE", 10_000)

    class Server(Canned):
        """Its objects have 1,000 bytes each, and there are 40."""

        def send(self, request: RestRequest, patience: float, most: int = 0) -> Response:
            query = dict(request.query)
            self.queries.append(query)
            begin, limit = int(query.get("continue", "0")), int(query["limit"])
            end = min(begin + limit, 40)
            items = [stored(annotations={"a": "x" * 500}) for _ in range(begin, end)]
            answer = written(page(*items, further=str(end) if end < 40 else ""))
            if most and len(answer) > most:
                raise AnswerTooLarge("too large")
            return Response(200, answer)

    server = Server(b"")
    assert len(ClusterApi(server).list(AddressBlock).items) == 40
    assert [each["limit"] for each in server.queries[:4]] == ["500", "125", "31", "7"]


def test_a_page_that_the_server_does_not_finish_is_smaller_the_next_time() -> None:
    class Slow(Canned):
        """It needs too long for more than 31 objects."""

        def send(self, request: RestRequest, patience: float, most: int = 0) -> Response:
            if int(dict(request.query)["limit"]) > 31:
                raise Unavailable("no answer")
            return super().send(request, patience, most)

    api = ClusterApi(Slow(page(stored())), timeout=0.01)
    for _ in range(2):
        with pytest.raises(Unavailable):
            api.list(AddressBlock)
    assert len(api.list(AddressBlock).items) == 1


def test_metadata_that_is_too_large_is_not_kept_and_is_named() -> None:
    fat = stored(labels=FAT, managedFields=[DEEP], generation=3)
    api = ClusterApi(Canned(page(fat, stored(managedFields=[{"x": "y" * 20_000}]))))
    found, well = api.list(AddressBlock).items
    assert found.metadata == Meta(name=name_of(fat), uid="u", resource_version="7", generation=3)
    assert well.metadata.uid == "u"
    (named,) = api.unreadable()
    assert named.metadata.name == name_of(fat)
    assert "its metadata has more than 8192 bytes" in named.why
    again = ClusterApi(Canned(fat)).get(AddressBlock, name_of(fat))
    assert again == found


def test_a_node_that_cannot_be_read_is_there_and_not_ready() -> None:
    bad = {"metadata": {"name": "b", "uid": "v"}, "spec": {"taints": DEEP}}
    api = ClusterApi(Canned(page({"metadata": {"name": "a", "uid": "u"}}, bad)))
    a, b = all_nodes(api)
    assert (a.name, b.name, b.uid, b.is_ready) == ("a", "b", "v", False)
    assert [each.kind for each in api.unreadable()] == ["Node"]


def test_a_pod_is_a_pod_however_deep_or_large(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClusterApi(Canned(page({"metadata": {"managedFields": [DEEP]}}))).has_pods("node-a")

    def too_large(*arguments: object) -> Response:
        raise AnswerTooLarge("too large")

    transport = Canned(b"")
    monkeypatch.setattr(transport, "send", too_large)
    assert ClusterApi(transport).has_pods("node-a")


def test_what_is_not_text_is_no_text_of_an_object() -> None:
    found = replace(block(), metadata=Meta(name="x", uid="u", resource_version="7"))
    body = json.dumps(document(found)).encode().replace(b'"Active"', b'"\xff"')
    listing = ClusterApi(Canned(b'{"metadata":{},"items":[%s]}' % body)).list(AddressBlock)
    assert len(listing.unreadable) == 1
