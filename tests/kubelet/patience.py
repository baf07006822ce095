"""Long timeouts for a kubelet on a busy machine."""

import pytest

from deviceplugin import pool_service, reconcile
from deviceplugin.kubelet import records
from gpu.pools import pre_start
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def kubelet_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the product's timeouts for the kubelet, so that late answers still count."""
    monkeypatch.setattr(records, "KUBELET_TIMEOUT", PATIENCE)
    for module in (pool_service, reconcile, pre_start):
        monkeypatch.setattr(module, "ASK_KUBELET", PATIENCE)
