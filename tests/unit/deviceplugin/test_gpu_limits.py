"""The part `gpuLimits` of config.yaml: what is read, and what is an error."""

from pathlib import Path

import pytest

from deviceplugin.pools import gpu_limits
from deviceplugin.pools.config import ConfigError, DevicePluginConfig
from deviceplugin.pools.formats import parse
from gpu import layout
from gpu.settings import GpuLimitSettings

SLICE = "[{shapes: [{name: a/b, memory: 400Mi, compute: 10}]}]"


def parsed(limits: str, gpus: str = "[]") -> DevicePluginConfig:
    content = f"pools: []\ngpus: {gpus}\ngpuLimits: {limits}"
    return parse(content.encode(), "config.yaml")


def test_a_file_without_the_part_has_the_defaults() -> None:
    assert parse(b"pools: []", "config.yaml").gpu_limits == GpuLimitSettings()


def test_every_key_is_read() -> None:
    read = parsed(
        "{driverRoot: /run/nvidia/driver, "
        "onOveruse: kill, killUnaccounted: true, contextReserve: 500Mi, "
        "managed: ignore, external: deny, unknown: warn, onError: allow, "
        "compat: {metrics: [alnair]}}"
    )
    assert read.gpu_limits == GpuLimitSettings(
        driver_root=Path("/run/nvidia/driver"),
        on_overuse="kill",
        kill_unaccounted=True,
        context_reserve=500 << 20,
        managed="ignore",
        external="deny",
        unknown="warn",
        on_error="allow",
        alnair_metrics=True,
    )


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("{}", 0),
        ("{managed: charge, external: allow, unknown: deny, onError: deny}", 0),
        ("{managed: ignore}", layout.MANAGED_IGNORE),
        ("{managed: deny, external: deny}", layout.MANAGED_DENY | layout.EXTERNAL_DENY),
        ("{unknown: warn, onError: allow}", layout.UNKNOWN_WARN | layout.ERROR_ALLOW),
    ],
)
def test_what_shims_do_is_told_by_bits(text: str, policy: int) -> None:
    assert parsed(text).gpu_limits.policy == policy


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{onOverus: kill}", 'gpuLimits.onOverus: unknown key: did you mean "onOveruse"'),
        ("{require: none}", "gpuLimits.require: unknown key"),
        ("{driverRoot: run/nvidia}", "gpuLimits.driverRoot: 'run/nvidia': expected the path"),
        ("{driverRoot: /run/../nvidia}", "gpuLimits.driverRoot: '/run/../nvidia'"),
        ("{onOveruse: stop}", "gpuLimits.onOveruse: 'stop': expected one of report, throttle"),
        ("{contextReserve: lots}", "gpuLimits.contextReserve: 'lots': expected bytes"),
        ("{managed: count}", "gpuLimits.managed: 'count': expected one of charge, ignore, deny"),
        ("{external: none}", "gpuLimits.external: 'none': expected one of allow, deny"),
        ("{unknown: allow}", "gpuLimits.unknown: 'allow': expected one of deny, warn"),
        ("{onError: warn}", "gpuLimits.onError: 'warn': expected one of deny, allow"),
        ("{compat: {metrics: [hami]}}", r"gpuLimits.compat.metrics\[0\]: 'hami'"),
        ("{compat: {metric: []}}", "gpuLimits.compat.metric: unknown key"),
    ],
)
def test_a_mistake_names_the_key(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parsed(text)


def test_a_slice_that_is_too_small_for_a_context_is_refused() -> None:
    text = r"gpus\[0\].shapes\[0\].memory: 400Mi is not enough .* charged with 400Mi"
    with pytest.raises(ConfigError, match=text):
        parsed("{}", SLICE)
    parsed("{contextReserve: 399Mi}", SLICE)


def test_a_unit_may_be_smaller_since_a_container_asks_for_several() -> None:
    (pool,) = parsed("{}", "[{mode: units, unit: 256Mi}]").gpus
    assert pool.unit == 256 << 20


def test_every_key_is_in_the_document() -> None:
    table = (Path(__file__).parents[3] / "docs/gpu-limits.md").read_text()
    assert [key for key in gpu_limits.KEYS if f"| `{key}` |" not in table] == []
