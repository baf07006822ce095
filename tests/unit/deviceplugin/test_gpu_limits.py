"""The part `gpuLimits` of config.yaml: what is read, and what is an error."""

from pathlib import Path

import pytest

from deviceplugin.pools.formats import parse
from deviceplugin.pools.pool_config import ConfigError, DevicePluginConfig
from gpu import gpu_pool_keys
from gpu.gpu_pool import GpuLimitSettings

SLICE = "[{shapes: [{name: a/b, memory: 400Mi, compute: 10}]}]"


def parsed(limits: str, gpus: str = "[]") -> DevicePluginConfig:
    content = f"pools: []\ngpus: {gpus}\ngpuLimits: {limits}"
    return parse(content.encode(), "config.yaml")


def test_a_file_without_the_part_has_the_defaults() -> None:
    assert parse(b"pools: []", "config.yaml").gpu_limits == GpuLimitSettings()


def test_every_key_is_read() -> None:
    read = parsed("{driverRoot: /run/nvidia/driver, onOveruse: kill}")
    assert read.gpu_limits == GpuLimitSettings(
        driver_root=Path("/run/nvidia/driver"),
        on_overuse="kill",
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{onOverus: kill}", 'gpuLimits.onOverus: unknown key: did you mean "onOveruse"'),
        ("{require: none}", "gpuLimits.require: unknown key"),
        ("{driverRoot: run/nvidia}", "gpuLimits.driverRoot: 'run/nvidia': write an absolute"),
        ("{driverRoot: /run/../nvidia}", "gpuLimits.driverRoot: '/run/../nvidia'"),
        ("{onOveruse: stop}", "gpuLimits.onOveruse: 'stop': expected one of report, kill"),
    ],
)
def test_a_mistake_names_the_key(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parsed(text)


def test_a_slice_that_is_too_small_for_a_context_is_refused() -> None:
    text = r"gpus\[0\].shapes\[0\].memory: 400Mi is too little, because .* takes 400Mi"
    with pytest.raises(ConfigError, match=text):
        parsed("{}", SLICE)
    parsed("{}", SLICE.replace("400Mi", "401Mi"))


def test_a_unit_may_be_smaller_since_a_container_asks_for_several() -> None:
    (pool,) = parsed("{}", "[{mode: units, unit: 256Mi}]").gpus
    assert pool.unit == 256 << 20


def test_every_key_is_in_the_document() -> None:
    table = (Path(__file__).parents[3] / "docs/use/gpus.md").read_text()
    assert [key for key in gpu_pool_keys.LIMIT_KEYS if f"| `{key}` |" not in table] == []
