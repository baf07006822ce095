"""Tests of every implementation of ClusterApi: the stand-in here, and the real client in tests/api.

A subclass has a fixture `api`. Each test has a range of its own (`pool`, `block`), so that one
server can serve all of them.
"""

import itertools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from ipam.addresses import parse, text
from ipam.leases.block_layout import block_name, pool_name
from ipam.leases.objects import (
    AddressBlock,
    AddressCounts,
    AddressPool,
    AddressReservation,
    BlockSpec,
    BlockStatus,
    Condition,
    Holder,
    OwnerReference,
    PoolSpec,
    PoolStatus,
    ReservationSpec,
    ReservationStatus,
)
from kube.client import ClusterApi
from kube.resources import AlreadyExists, Conflict, Meta, Node, NotFound, Refused, WatchExpired

NODE = "node-a"
"""The node of the client's token, where the server looks at tokens."""
_numbers = itertools.count()


def pool(network_name: str = "contract") -> AddressPool:
    """A pool that was not yet written, of a range of its own."""
    number = next(_numbers)
    range_ = f"10.{number // 256}.{number % 256}.0/24"
    name = pool_name(network_name, range_)
    return AddressPool(
        metadata=Meta(name=name), spec=PoolSpec(range=range_, network_name=network_name)
    )


def block(instance: str = "", node: str = NODE, first: str = "", prefix: int = 27) -> AddressBlock:
    """A block that was not yet written, of addresses of its own."""
    number = next(_numbers)
    first = first or f"10.{100 + number // 256}.{number % 256}.64"
    return AddressBlock(
        metadata=Meta(name=block_name("contract", parse(first), prefix)),
        spec=BlockSpec(
            pool="contract-10.0.0.0-8",
            range=f"{text(parse(first))}/{prefix}",
            holder=Holder(
                instance=instance or str(uuid.uuid4()),
                node=node,
                node_uid="7c1e",
                machine_id="m" * 32,
                system_uuid="s",
                boot="b",
            ),
            nonce=str(uuid.uuid4()),
        ),
    )


def reservation(namespace: str = "default") -> AddressReservation:
    """A reservation that was not yet written."""
    owner = OwnerReference(kind="StatefulSet", name="trainer", ifname="net1")
    return AddressReservation(
        metadata=Meta(name=f"reservation-{uuid.uuid4()}", namespace=namespace),
        spec=ReservationSpec(pool="contract-10.0.0.0-8", owner=owner),
    )


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """The block raises the error, whose text has these words."""
    with pytest.raises(error) as raised:
        yield
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value)


class ApiContract:
    """The tests."""

    def test_what_is_created_is_read_back(self, api: ClusterApi) -> None:
        for new in (pool(), block(), reservation()):
            stored = api.create(new)
            assert replace(stored, metadata=new.metadata) == new
            meta = stored.metadata
            assert meta.uid
            assert meta.resource_version
            assert meta.creation_timestamp.endswith("Z")
            assert meta.generation == 1
            assert api.get(type(new), meta.name, meta.namespace) == stored

    def test_a_change_keeps_what_users_have_written_beside_it(self, api: ClusterApi) -> None:
        new = pool()
        meta = replace(
            new.metadata,
            labels={"team": "a"},
            annotations={"example.com/note": "keep"},
            finalizers=("example.com/hold",),
        )
        stored = api.create(replace(new, metadata=meta))
        stored = api.update(replace(stored, spec=replace(stored.spec, max_blocks_per_node=3)))
        stored = api.update_status(replace(stored, status=PoolStatus(space="contract")))
        kept = stored.metadata
        assert (kept.labels, kept.annotations, kept.finalizers) == (
            {"team": "a"},
            {"example.com/note": "keep"},
            ("example.com/hold",),
        )
        free = api.update(replace(stored, metadata=replace(kept, finalizers=())))
        api.delete(free)

    def test_all_fields_of_a_pool_are_kept(self, api: ClusterApi) -> None:
        new = pool()
        spec = replace(
            new.spec,
            exclude=(new.spec.range.replace("0/24", "8/29"),),
            block_size=16,
            max_blocks_per_node=4,
            state="Draining",
        )
        stored = api.create(replace(new, spec=spec))
        assert stored.spec == spec
        ready = Condition(
            type="Ready",
            status="True",
            reason="Sized",
            last_transition_time="2026-11-23T07:00:00Z",
            observed_generation=1,
        )
        status = PoolStatus(
            space="contract",
            block_size=16,
            addresses=AddressCounts(capacity=2**63 - 1, used=3),
            free_map="AAA=",
            conditions=(ready,),
        )
        assert api.update_status(replace(stored, status=status)).status == status
        assert api.get(AddressPool, new.metadata.name).status == status

    def test_an_ipv6_block_has_a_name(self, api: ClusterApi) -> None:
        for first, prefix in (("2001:db8:7::", 121), ("fd00::1:0:0:100", 128), ("::ff00", 120)):
            new = block(first=first, prefix=prefix)
            stored = api.create(new)
            assert stored.spec.range == f"{first}/{prefix}"
            api.delete(stored)

    def test_a_name_is_taken_once(self, api: ClusterApi) -> None:
        new = block()
        stored = api.create(new)
        twin = replace(new, spec=replace(new.spec, nonce="another"))
        with refused(AlreadyExists, "create", "AddressBlock", new.metadata.name):
            api.create(twin)
        assert api.get(AddressBlock, new.metadata.name) == stored

    def test_what_does_not_exist_is_not_found(self, api: ClusterApi) -> None:
        with refused(NotFound, "get", "AddressBlock", "contract.10.9.9.9-32"):
            api.get(AddressBlock, "contract.10.9.9.9-32")
        with refused(NotFound, "node-that-is-not"):
            api.get(Node, "node-that-is-not")

    def test_a_create_ignores_the_status(self, api: ClusterApi) -> None:
        stored = api.create(replace(block(), status=BlockStatus(used=9)))
        assert stored.status == BlockStatus()

    def test_an_update_changes_the_spec_only(self, api: ClusterApi) -> None:
        first = api.create(block())
        used = api.update_status(replace(first, status=BlockStatus(used=7, holders={"3": "a/b"})))
        assert used.metadata.generation == 1
        spec = replace(used.spec, state="Draining")
        second = api.update(replace(used, spec=spec, status=BlockStatus()))
        assert second.spec == spec
        assert second.status == BlockStatus(used=7, holders={"3": "a/b"})
        assert second.metadata.uid == first.metadata.uid
        assert second.metadata.resource_version != used.metadata.resource_version
        assert second.metadata.generation == 2

    def test_a_status_update_changes_the_status_only(self, api: ClusterApi) -> None:
        first = api.create(block())
        spec = replace(first.spec, state="Draining")
        second = api.update_status(replace(first, spec=spec, status=BlockStatus(used=1)))
        assert second.spec == first.spec
        assert second.status.used == 1

    def test_the_status_of_a_reservation_is_kept(self, api: ClusterApi) -> None:
        first = api.create(reservation())
        status = ReservationStatus(addresses=("10.0.0.9",), bound_to=NODE)
        assert api.update_status(replace(first, status=status)).status == status

    def test_an_update_that_changes_nothing_keeps_the_version(self, api: ClusterApi) -> None:
        first = api.create(block())
        assert api.update(first) == first

    def test_a_change_of_an_older_version_is_a_conflict(self, api: ClusterApi) -> None:
        first = api.create(block())
        api.update(replace(first, spec=replace(first.spec, state="Draining")))
        for change in (api.update, api.update_status, api.delete):
            with refused(Conflict, "AddressBlock", first.metadata.name):
                change(replace(first, status=BlockStatus(used=5)))

    def test_a_change_of_an_earlier_object_of_the_name_is_a_conflict(self, api: ClusterApi) -> None:
        first = api.create(block())
        api.delete(first)
        second = api.create(replace(first, metadata=Meta(name=first.metadata.name)))
        assert second.metadata.uid != first.metadata.uid
        newest = replace(second.metadata, uid=first.metadata.uid)
        for meta in (first.metadata, newest):
            for change in (api.update, api.update_status, api.delete):
                with refused(Conflict):
                    change(replace(second, metadata=meta, status=BlockStatus(used=5)))
        assert api.get(AddressBlock, first.metadata.name) == second

    def test_a_change_of_a_deleted_object_fails(self, api: ClusterApi) -> None:
        first = api.create(block())
        api.delete(first)
        with refused(NotFound, "delete", first.metadata.name):
            api.delete(first)
        for change in (api.update, api.update_status):
            with pytest.raises((NotFound, Conflict)):
                change(replace(first, spec=replace(first.spec, state="Draining")))
        with refused(NotFound):
            api.get(AddressBlock, first.metadata.name)

    def test_a_change_needs_a_version(self, api: ClusterApi) -> None:
        first = api.create(block())
        for without in (
            replace(first.metadata, resource_version=""),
            replace(first.metadata, uid=""),
        ):
            for change in (api.update, api.update_status, api.delete):
                with refused(Refused):
                    change(replace(first, metadata=without))

    def test_the_epoch_grows_with_the_holder(self, api: ClusterApi) -> None:
        first = api.create(block())
        other = replace(first.spec.holder, instance=str(uuid.uuid4()))
        for epoch in (first.spec.epoch, first.spec.epoch + 2, 0):
            with refused(Refused):
                api.update(replace(first, spec=replace(first.spec, holder=other, epoch=epoch)))
        taken = replace(first.spec, holder=other, epoch=first.spec.epoch + 1)
        assert api.update(replace(first, spec=taken)).spec == taken

    def test_a_list_has_what_its_fields_select(self, api: ClusterApi) -> None:
        ours, theirs = str(uuid.uuid4()), str(uuid.uuid4())
        mine = {api.create(block(ours)).metadata.name for _ in range(3)}
        api.create(block(theirs))
        found = api.list(AddressBlock, {"spec.holder.instance": ours})
        assert {each.metadata.name for each in found.items} == mine
        assert int(found.resource_version) > 0
        fields = {"spec.holder.instance": ours, "spec.state": "Draining"}
        assert not api.list(AddressBlock, fields).items
        everything = {each.metadata.name for each in api.list(AddressBlock).items}
        assert everything > mine
        with refused(Refused):
            api.list(AddressBlock, {"spec.nonce": "x"})

    def test_a_list_has_what_its_labels_select(self, api: ClusterApi) -> None:
        job = str(uuid.uuid4())
        for labels in ({"job": job, "rank": "0"}, {"job": job}, {"rank": "0"}):
            new = reservation()
            api.create(replace(new, metadata=replace(new.metadata, labels=labels)))
        for selector, count in ((f"job={job}", 2), (f"job={job},rank", 1), (f"job=x{job}", 0)):
            found = api.list(AddressReservation, namespace="default", labels=selector)
            assert len(found.items) == count

    def test_a_list_of_the_first_ones_says_whether_there_are_others(self, api: ClusterApi) -> None:
        for _ in range(3):
            api.create(block())
        everything = api.list(AddressBlock)
        count = len(everything.items)
        assert everything.is_whole
        assert api.list(AddressBlock, most=count).is_whole
        some = api.list(AddressBlock, most=count - 1)
        assert (len(some.items), some.is_whole) == (count - 1, False)

    def test_a_watch_shows_what_comes_after_its_version(self, api: ClusterApi) -> None:
        before = api.create(block())
        first = api.create(block())
        changed = api.update(replace(first, spec=replace(first.spec, state="Draining")))
        api.delete(changed)
        watch = api.watch(AddressBlock, before.metadata.resource_version)
        seen = list(itertools.islice(watch, 3))
        assert [each.type for each in seen] == ["ADDED", "MODIFIED", "DELETED"]
        assert [each.object for each in seen[:2]] == [first, changed]
        versions = [int(each.object.metadata.resource_version) for each in seen]
        assert versions == sorted(set(versions))

    def test_a_watch_of_a_version_too_old_expires(
        self, api: ClusterApi, expired_version: str
    ) -> None:
        with refused(WatchExpired):
            next(iter(api.watch(AddressBlock, expired_version)))
