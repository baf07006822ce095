"""A kubelet on a busy machine may take its time."""

import pytest

from deviceplugin import pool_service, reconcile
from deviceplugin.gpus import start
from deviceplugin.kubelet import records
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def kubelet_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What anybody asks of the kubelet they are told, however late."""
    monkeypatch.setattr(records, "KUBELET_TIMEOUT", PATIENCE)
    for module in (pool_service, reconcile, start):
        monkeypatch.setattr(module, "ASK_KUBELET", PATIENCE)
