"""A kubelet on a busy machine may take its time."""

import pytest

from deviceplugin import pool_service, reconcile
from deviceplugin.kubelet import records
from gpu.pools import pre_start
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def kubelet_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What anybody asks of the kubelet they are told, however late."""
    monkeypatch.setattr(records, "KUBELET_TIMEOUT", PATIENCE)
    for module in (pool_service, reconcile, pre_start):
        monkeypatch.setattr(module, "ASK_KUBELET", PATIENCE)
