"""Reads the flags of the device plugin, including the flags of the plugins that it replaces.

The syntax is that of Go's flag package: one dash or two, `-x=y` or `-x y`.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from base.documents import DocumentError
from deviceplugin.kubelet.extended_resources import resource_problem
from deviceplugin.pools import formats
from deviceplugin.pools.pool_config import ConfigError, DevicePluginConfig, PoolConfig
from gpu import gpu_pool_keys
from gpu.gpu_pool import GpuPoolConfig
from host.sysfs.selectors import Selector
from host.sysfs.selectors import parse as parse_selector

_WITH_VALUE = {
    "config": "config",  # our own
    "config-file": "config",  # Mellanox, SR-IOV
    "resource-prefix": "prefix",  # SR-IOV
    "resource-name": "name",  # k8s-ib-device-plugin, k8s-rdma-device-plugin
    "resource-amount": "amount",  # k8s-ib-device-plugin
    "resouce-amount": "amount",  # the spelling in the plugin's README
    "master": "master",  # k8s-rdma-device-plugin
    "host-path": "host-path",  # Deepomatic's shared-gpu, and the three below
    "container-path": "container-path",
    "plugin-directory": "plugin-directory",
    "gpu-duplication-factor": "factor",
}
_SWITCHES = {"use-cdi": "cdi"}  # Mellanox, SR-IOV
FLAGS = (*_WITH_VALUE, *_SWITCHES)
_OF_POOL = ("name", "amount", "master")
_OF_GPUS = ("host-path", "container-path", "plugin-directory", "factor")
SHARED_GPU = "deepomatic.com/shared-gpu"
SOCKETS = Path("/device-plugin")  # the default of -plugin-directory, if it exists

# strconv.ParseBool
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_FALSE = ("0", "f", "F", "FALSE", "false", "False")

_EVERY_VF = "#0-65535"


class CommandLine(msgspec.Struct, frozen=True, kw_only=True):
    file: Path | None = None  # `None`: the default file, which need not exist
    prefix: str = ""
    cdi: bool = False
    pool: PoolConfig | None = None  # the only pool; then no file is read
    gpus: GpuPoolConfig | None = None  # the only pool, if it has GPUs
    plugin_directory: Path | None = None  # of the sockets; `None`: the kubelet's

    def watched(self, usual: Path) -> Path | None:
        """The file to watch for changes, or `None` if no file is read."""
        return None if self.pool or self.gpus else self.file or usual

    def load(self, usual: Path) -> DevicePluginConfig:
        """Raises ConfigError."""
        if self.gpus:
            return DevicePluginConfig(pools=(), gpus=(self.gpus,))
        if self.pool:
            return DevicePluginConfig(pools=(self.pool,))
        return formats.load(
            self.file or usual, prefix=self.prefix, cdi=self.cdi, required=self.file is not None
        )


def parse_command_line(arguments: Sequence[str]) -> tuple[CommandLine, list[str]]:
    """The flags, and the arguments that are not flags. Raises ConfigError."""
    flags, rest = _split(arguments)
    gpu_flags = [_flag(key) for key in _OF_GPUS if key in flags]
    if gpu_flags:
        if others := sorted(set(flags).difference(_OF_GPUS)):
            raise ConfigError(
                f"{gpu_flags[0]} and {_flag(others[0])}: cannot be used together: write the pools "
                "into a file, and use only -config FILE"
            )
        return _shared_gpu(flags), rest
    pool_flags = [_flag(key) for key in _OF_POOL if key in flags]
    if not pool_flags:
        file = flags.get("config")
        if file == "":
            raise ConfigError("-config: is empty: name a file, or omit the flag")
        command = CommandLine(
            file=Path(file) if file else None,
            prefix=flags.get("prefix", ""),
            cdi=flags.get("cdi") == "true",
        )
        return command, rest
    for key in ("config", "prefix"):
        if key in flags:
            raise ConfigError(
                f"{_flag(key)} and {pool_flags[0]}: cannot be used together: keep one flag"
            )
    return CommandLine(pool=_pool(flags)), rest


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    flags: dict[str, str] = {}
    rest: list[str] = []
    todo = list(arguments)
    while todo:
        argument = todo.pop(0)
        if argument == "--":
            return flags, [*rest, argument, *todo]
        flag, equals, value = argument.removeprefix("-").removeprefix("-").partition("=")
        key = _WITH_VALUE.get(flag) or _SWITCHES.get(flag)
        if not argument.startswith("-") or argument.startswith("---") or key is None:
            rest.append(argument)
            continue
        if flag in _SWITCHES:
            if equals and value not in (*_TRUE, *_FALSE):
                raise ConfigError(f"-{flag}: {value!r}: expected true or false")
            value = "false" if value in _FALSE else "true"
        elif not equals:
            if not todo:
                raise ConfigError(f"-{flag}: needs a value")
            value = todo.pop(0)
        if flags.setdefault(key, value) != value:
            raise ConfigError(f"-{flag}: has two values, {flags[key]!r} and {value!r}: keep one")
    return flags, rest


def _pool(flags: dict[str, str]) -> PoolConfig:
    cdi = flags.get("cdi") == "true"
    if "amount" in flags:
        if "master" in flags:
            raise ConfigError(
                "-master and -resource-amount: cannot be used together: keep -resource-amount "
                "to give each pod all HCAs, or -master to give each pod its own HCA"
            )
        resource = _resource(flags.get("name", "ib.plugin/infiniband"))
        amount = _number("-resource-amount", flags["amount"])
        return PoolConfig(resource=resource, mode="all", amount=amount, cdi=cdi)
    resource = _resource(flags.get("name", "tencent.com/rdma"))
    chosen: tuple[Selector, ...] = ()
    if master := flags.get("master", ""):
        try:
            chosen = (parse_selector({"pfNames": [master + _EVERY_VF]}, "-master"),)
        except DocumentError:
            raise ConfigError(
                f"-master: {master!r}: is not an interface name: write a name such as ib0"
            ) from None
    return PoolConfig(resource=resource, mode="exclusive", selectors=chosen, used="named", cdi=cdi)


def _shared_gpu(flags: dict[str, str]) -> CommandLine:
    mounted = {
        "host": flags.get("host-path", "/home/kubernetes/bin/nvidia"),
        "container": flags.get("container-path", "/usr/local/nvidia"),
    }
    try:
        driver = gpu_pool_keys.driver_mount(mounted, "-host-path, -container-path")
    except DocumentError as error:
        raise ConfigError(str(error)) from None
    directory = flags.get("plugin-directory")
    if directory == "":
        raise ConfigError("-plugin-directory: is empty: name a directory, or omit the flag")
    if directory is None and SOCKETS.is_dir():
        directory = str(SOCKETS)
    pool = GpuPoolConfig(
        mode="replicas",
        resource=SHARED_GPU,
        replicas=_number("-gpu-duplication-factor", flags.get("factor", "100")),
        placement="spread",
        driver_mount=driver,
    )
    return CommandLine(gpus=pool, plugin_directory=Path(directory) if directory else None)


def _number(flag: str, text: str) -> int:
    """A number as Go's flag package reads it: "100", "0x64"."""
    try:
        number = int(text, 0) if len(text) <= 8 and text.isascii() else 0
    except ValueError:
        number = 0
    if not 1 <= number <= 10_000:
        raise ConfigError(f"{flag}: {text!r}: expected a number from 1 to 10000")
    return number


def _flag(key: str) -> str:
    return f"-{next(flag for flag, of in (_WITH_VALUE | _SWITCHES).items() if of == key)}"


def _resource(name: str) -> str:
    if problem := resource_problem(name):
        raise ConfigError(f"-resource-name: {name!r}: {problem}")
    return name
