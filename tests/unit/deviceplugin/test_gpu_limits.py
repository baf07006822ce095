"""The part `gpuLimits` of config.yaml: what is read, and what is an error."""

from pathlib import Path

import pytest

from deviceplugin.pools import gpu_limits
from deviceplugin.pools.config import ConfigError, DevicePluginConfig
from deviceplugin.pools.formats import parse
from gpu import layout
from gpu.settings import GpuLimitSettings, MpsDirectories

SLICE = "[{shapes: [{name: a/b, memory: 400Mi, compute: 10}]}]"


def parsed(limits: str, gpus: str = "[]") -> DevicePluginConfig:
    content = f"pools: []\ngpus: {gpus}\ngpuLimits: {limits}"
    return parse(content.encode(), "config.yaml")


def test_a_file_without_the_part_has_limits_kept_by_the_shim_or_no_gpu() -> None:
    settings = parse(b"pools: []", "config.yaml").gpu_limits
    assert settings == GpuLimitSettings()
    assert (settings.enforce, settings.require) == (("shim",), "shim")


def test_every_key_is_read() -> None:
    read = parsed(
        "{enforce: [kernel, shim], require: none, driverRoot: /run/nvidia/driver, "
        "onOveruse: kill, killUnaccounted: true, contextReserve: 500Mi, "
        "managed: ignore, external: deny, unknown: warn, onError: allow, "
        "compat: {metrics: [alnair]}, "
        "mps: {pipes: /tmp/nvidia-mps, shm: /dev/shm}}"
    )
    assert read.gpu_limits == GpuLimitSettings(
        enforce=("kernel", "shim"),
        require="none",
        driver_root=Path("/run/nvidia/driver"),
        on_overuse="kill",
        kill_unaccounted=True,
        context_reserve=500 << 20,
        managed="ignore",
        external="deny",
        unknown="warn",
        on_error="allow",
        alnair_metrics=True,
        mps=MpsDirectories(pipes=Path("/tmp/nvidia-mps"), shm=Path("/dev/shm")),
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
        ("{enforced: [shim]}", 'gpuLimits.enforced: unknown key: did you mean "enforce"'),
        ("{enforce: [shims]}", r"gpuLimits.enforce\[0\]: 'shims': expected one of mig, kernel"),
        ("{require: all}", "gpuLimits.require: 'all': expected one of"),
        ("{require: kernel}", "require: kernel: gpuLimits.enforce allows shim, so no GPU would"),
        ("{enforce: []}", "require: shim: gpuLimits.enforce allows nothing"),
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
        ("{enforce: [mps]}", "gpuLimits.enforce: mps: write gpuLimits.mps too, with the director"),
        ("{mps: {pipes: /tmp/nvidia-mps}}", "gpuLimits.mps.shm: is missing: write a directory"),
        ("{mps: {pipes: mps, shm: /dev/shm}}", "gpuLimits.mps.pipes: 'mps': expected the path"),
        ("{mps: {pipe: /a, shm: /dev/shm}}", 'gpuLimits.mps.pipe: unknown key: did you mean "pi'),
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
    with pytest.raises(ConfigError, match=text):
        parsed("{enforce: [kernel], require: kernel}", SLICE)
    parsed("{enforce: [], require: none}", SLICE)  # nothing is charged


def test_a_unit_may_be_smaller_since_a_container_asks_for_several() -> None:
    (pool,) = parsed("{}", "[{mode: units, unit: 256Mi}]").gpus
    assert pool.unit == 256 << 20


def test_every_key_is_in_the_document() -> None:
    table = (Path(__file__).parents[3] / "docs/gpu-limits.md").read_text()
    assert [key for key in gpu_limits.KEYS if f"| `{key}` |" not in table] == []
