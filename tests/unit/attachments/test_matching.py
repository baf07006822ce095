"""Attachments of a pod that choose at the same time, and where the choice is shown."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from base import interrupts
from cni.attachments.pod_choices import lock_of
from cni.attachments.results import interface_of
from cni.spec.request import Request
from tests.unit.attachments.choosing import POD, ipoib
from tests.unit.deviceplugin.holding import Holding
from tests.unit.host import servers
from tests.waiting import PATIENCE

A, VF = servers.DGX_HCAS[0], servers.VFS_ETHERNET[0]


def test_attachments_at_once_are_on_different_hcas(server: Holding) -> None:
    server.give(POD, {"0": servers.DGX_HCAS})
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda n: ipoib(server, f"net{n}"), range(8)))
    assert sorted(chosen) == [f"ib{n}" for n in range(8)]
    assert list(server.paths.locks.iterdir()) == []


def test_attachment_that_waits_for_another_of_its_pod_can_be_cancelled(server: Holding) -> None:
    server.give(POD, {f"{A}-0": [A]})
    call = interrupts.Call(endable=True)

    def waiting() -> str:
        with interrupts.serving(call):
            return ipoib(server)

    with (
        FileLock(_made(lock_of(server.paths, POD))),
        ThreadPoolExecutor(1) as pool,
    ):
        choosing = pool.submit(waiting)
        call.end()
        with pytest.raises(interrupts.Terminated):
            choosing.result(PATIENCE)


def _made(lock: Path) -> Path:
    lock.parent.mkdir(parents=True)
    return lock


@pytest.mark.parametrize(
    ("rdma", "shown"), [(["mlx5_99", "mlx5_6"], ("mlx5_6", "uverbs6")), (["mlx5_99"], ("", ""))]
)
def test_result_has_the_first_rdma_device_with_a_uverbs_device(
    card: Holding, rdma: list[str], shown: tuple[str, str]
) -> None:
    made = interface_of(card.paths, Request(command="ADD"), mac="", mtu=0, bdf="", rdma=rdma)
    assert (made.rdmaDevice, made.uverbs) == shown
