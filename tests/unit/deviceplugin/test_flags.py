"""The flags of the plugins that this one stands in for."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from deviceplugin.pools.flags import CommandLine, parse_command_line
from deviceplugin.pools.pool_config import ConfigError, DevicePluginConfig, PoolConfig
from gpu.driver.driver_files import SharedFile
from gpu.gpu_pool import GpuPoolConfig
from host.sysfs.selectors import Selector

USUAL = Path("/nowhere/config.yaml")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], CommandLine()),
        (["--config", "/a"], CommandLine(file=Path("/a"))),
        (["-config-file=/a", "-use-cdi"], CommandLine(file=Path("/a"), cdi=True)),
        (["--use-cdi=false"], CommandLine()),
        (
            ["--config-file", "/a", "--resource-prefix", "x.io", "--use-cdi=T"],
            CommandLine(file=Path("/a"), prefix="x.io", cdi=True),
        ),
    ],
)
def test_a_file_is_named(arguments: list[str], expected: CommandLine) -> None:
    assert parse_command_line(arguments) == (expected, [])


@pytest.mark.parametrize(
    ("arguments", "pool", "directory"),
    [
        (["-gpu-duplication-factor=2"], {"replicas": 2}, None),
        (["--gpu-duplication-factor", "0x10"], {"replicas": 16}, None),
        (
            ["-host-path", "/a", "--container-path=/b/"],
            {"driver_mount": SharedFile("/a", "/b")},
            None,
        ),
        (["-plugin-directory=/x"], {}, Path("/x")),
    ],
)
def test_flags_of_shared_gpu_are_a_pool_of_gpus(
    arguments: list[str], pool: dict[str, object], directory: Path | None
) -> None:
    usual = GpuPoolConfig(
        mode="replicas",
        resource="deepomatic.com/shared-gpu",
        replicas=100,
        placement="spread",
        driver_mount=SharedFile("/home/kubernetes/bin/nvidia", "/usr/local/nvidia"),
    )
    command, rest = parse_command_line(arguments)
    assert rest == []
    assert command.load(USUAL) == DevicePluginConfig(pools=(), gpus=(replace(usual, **pool),))
    assert command.plugin_directory == directory
    assert command.watched(USUAL) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-gpu-duplication-factor=x"], "-gpu-duplication-factor: 'x': expected a number"),
        (["-gpu-duplication-factor=10001"], "expected a number from 1 to 10000"),
        (["-host-path=nvidia"], "-host-path, -container-path.host: 'nvidia'"),
        (["-plugin-directory="], "-plugin-directory: is empty"),
        (["-host-path=/a", "-master=ib0"], "-host-path and -master: cannot be used together"),
        (["-host-path=/a", "-config=/b"], "-host-path and -config: cannot be used together"),
    ],
)
def test_flags_of_shared_gpu_are_checked(arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        parse_command_line(arguments)


@pytest.mark.parametrize(
    ("arguments", "pool"),
    [
        (
            ["-resource-amount", "8"],
            PoolConfig(resource="ib.plugin/infiniband", mode="all", amount=8),
        ),
        (
            ["--resouce-amount=8", "-resource-name=a/b"],
            PoolConfig(resource="a/b", mode="all", amount=8),
        ),
        (
            ["-resource-amount=2", "-resouce-amount=2", "-use-cdi"],
            PoolConfig(resource="ib.plugin/infiniband", mode="all", amount=2, cdi=True),
        ),
        (["-resource-name", "a/b"], PoolConfig(resource="a/b", mode="exclusive", used="named")),
        (["-master="], PoolConfig(resource="tencent.com/rdma", mode="exclusive", used="named")),
        (
            ["-master", "ens2f0", "-resource-name", "a/b"],
            PoolConfig(
                resource="a/b",
                mode="exclusive",
                used="named",
                selectors=(Selector(pfNames=("ens2f0#0-65535",)),),
            ),
        ),
    ],
)
def test_flags_are_a_pool(arguments: list[str], pool: PoolConfig) -> None:
    command, rest = parse_command_line(arguments)
    assert rest == []
    assert command.load(USUAL) == DevicePluginConfig(pools=(pool,))
    assert command.watched(USUAL) is None


def test_other_arguments_are_handed_back_in_their_order() -> None:
    command, rest = parse_command_line(
        ["-v", "--dry-run", "--config=/a", "x", "-", "---config=b", "--", "-master", "c"]
    )
    assert command == CommandLine(file=Path("/a"))
    assert rest == ["-v", "--dry-run", "x", "-", "---config=b", "--", "-master", "c"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-config"], "-config: needs a value"),
        (["-config="], "-config: is empty"),
        (["-use-cdi=maybe"], "-use-cdi: 'maybe': expected true or false"),
        (["-resource-amount", "0"], "-resource-amount: '0': expected a number from 1 to 10000"),
        (["-resource-amount", "-1"], "-resource-amount: '-1': expected a number"),
        (["-resource-amount", "٣"], "-resource-amount: '٣': expected a number"),
        (
            ["-resource-amount=1", "-resouce-amount=2"],
            "-resouce-amount: has two values, '1' and",
        ),
        (["-resource-name", "hca"], "-resource-name: 'hca': write domain/name"),
        (["-master", "a b"], "-master: 'a b': is not an interface name"),
        (["-master", "a#1"], "-master: 'a#1': is not an interface name"),
        (
            ["-master", "a", "-resource-amount", "1"],
            "-master and -resource-amount: cannot be used together",
        ),
        (["--config", "/a", "-resource-name", "a/b"], "-config and -resource-name: cannot be used"),
        (["-resource-prefix", "a", "-master="], "-resource-prefix and -master: cannot be used"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_command_line(arguments)
    assert str(raised.value).startswith(error)


def test_the_usual_file_need_not_be_there_and_a_named_one_must(tmp_path: Path) -> None:
    absent = tmp_path / "absent.json"
    command, _ = parse_command_line(["-config-file", str(absent)])
    assert command.watched(USUAL) == absent
    with pytest.raises(ConfigError, match="this file does not exist"):
        command.load(USUAL)
    nothing, _ = parse_command_line([])
    assert nothing.watched(USUAL) == USUAL
    assert [pool.resource for pool in nothing.load(USUAL).pools] == ["rdma/hca"]


def test_prefix_and_cdi_reach_the_pools(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"resourceList": [{"resourceName": "a", "selectors": {}}]}')
    command, _ = parse_command_line(
        ["-config-file", str(path), "-use-cdi", "-resource-prefix", "x.io"]
    )
    (pool,) = command.load(USUAL).pools
    assert (pool.resource, pool.cdi) == ("x.io/a", True)
