"""The stand-in for the API server behaves as the real one, and has the faults that tests want."""

import pytest

from ipam.leases.objects import AddressBlock
from kube.client import ClusterApi
from tests.fake_api import FakeApi
from tests.unit.kube.contract import ApiContract


@pytest.fixture
def fake() -> FakeApi:
    return FakeApi(clock=lambda: 1_800_000_000.0)


class TestContract(ApiContract):
    """The contract."""

    @pytest.fixture
    def api(self, fake: FakeApi) -> ClusterApi:
        return fake.client("node-a")

    @pytest.fixture
    def expired_version(self, fake: FakeApi) -> str:
        version = fake.look_at_all(AddressBlock).resource_version
        fake.expire_watches()
        return version
