"""The agent's part of GPU limits is made for pools that have limits, and only for these."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.gpu_limits import AgentGpuLimits
from agent.observe.node_events import AgentEvents
from base.paths import Paths
from deviceplugin.pools.pool_config import DevicePluginConfig
from gpu.gpu_pool import GpuLimitSettings, GpuPoolConfig

REPLICAS = GpuPoolConfig(mode="replicas", resource="a/b", replicas=2)
UNITS = GpuPoolConfig(mode="units")


@pytest.fixture
def limits(tmp_path: Path) -> Iterator[AgentGpuLimits]:
    names = ("proc", "run", "state", "sys")
    paths = Paths(host=tmp_path, **{name: tmp_path / name for name in names})
    made = AgentGpuLimits(paths, lambda: (), lambda: (), AgentEvents({}))
    yield made
    made.close()


def config(*gpus: GpuPoolConfig, **settings: object) -> DevicePluginConfig:
    made = GpuLimitSettings(**settings)  # type: ignore[arg-type]
    return DevicePluginConfig(pools=(), gpus=gpus, gpu_limits=made)


def test_nothing_is_made_for_pools_without_limits(limits: AgentGpuLimits) -> None:
    for pools in ((), (REPLICAS,)):
        assert limits.parts(config(*pools)).groups is None
    limits.start()
    assert limits.families() == ()


def test_pools_with_limits_get_groups_which_stay_the_same(limits: AgentGpuLimits) -> None:
    parts = limits.parts(config(UNITS))
    assert parts.groups is not None
    assert limits.parts(config(REPLICAS)).groups is parts.groups
    assert "podfabric_gpu_nvml_up" in {family.name for family in limits.families()}


def test_changes_that_need_a_start_are_logged_once_and_not_taken(
    limits: AgentGpuLimits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    limits.parts(config(UNITS))
    for _ in range(2):
        limits.parts(config(UNITS, on_overuse="kill"))
    assert [record.message for record in caplog.records] == [
        "gpuLimits: the new settings apply when the agent starts again"
    ]
