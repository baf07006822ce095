"""The device plugin's command line: our own options, and those of the plugins it replaces.

Flags are written as Go's flag package takes them: one dash or two, `-x=y` or `-x y`. What is
none of these is handed back, for the command's own options.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from base.documents import DocumentError
from deviceplugin.pools import config
from deviceplugin.pools.config import ConfigError, DevicePluginConfig, PoolConfig, Selector
from deviceplugin.pools.selectors import parse as parse_selector

_WITH_VALUE = {
    "config": "config",  # our own
    "config-file": "config",  # Mellanox, SR-IOV
    "resource-prefix": "prefix",  # SR-IOV
    "resource-name": "name",  # k8s-ib-device-plugin, k8s-rdma-device-plugin
    "resource-amount": "amount",  # k8s-ib-device-plugin
    "resouce-amount": "amount",  # as its README has it
    "master": "master",  # k8s-rdma-device-plugin
}
_SWITCHES = {"use-cdi": "cdi"}  # Mellanox, SR-IOV
_POOL_FLAGS = {"name": "resource-name", "amount": "resource-amount", "master": "master"}

# strconv.ParseBool
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_FALSE = ("0", "f", "F", "FALSE", "false", "False")

_EVERY_VF = "#0-65535"


class CommandLine(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags say of the configuration."""

    file: Path | None = None  # None: the usual one, which need not exist
    prefix: str = ""
    cdi: bool = False
    pool: PoolConfig | None = None  # the only one, in place of any file

    def watched(self, usual: Path) -> Path | None:
        """The file whose changes count, None if there is none."""
        return None if self.pool else self.file or usual

    def load(self, usual: Path) -> DevicePluginConfig:
        """The configuration as it is now. Raises ConfigError."""
        if self.pool:
            return DevicePluginConfig(pools=(self.pool,))
        return config.load(
            self.file or usual, prefix=self.prefix, cdi=self.cdi, required=self.file is not None
        )


def parse_command_line(arguments: Sequence[str]) -> tuple[CommandLine, list[str]]:
    """What the flags say, and the arguments that are none of them. Raises ConfigError."""
    given, rest = _split(arguments)
    pool_flags = [f"-{flag}" for key, flag in _POOL_FLAGS.items() if key in given]
    if not pool_flags:
        file = given.get("config")
        if file == "":
            raise ConfigError("-config: is empty: name a file, or leave the flag out")
        command = CommandLine(
            file=Path(file) if file else None,
            prefix=given.get("prefix", ""),
            cdi=given.get("cdi") == "true",
        )
        return command, rest
    for key, flag in (("config", "-config"), ("prefix", "-resource-prefix")):
        if key in given:
            raise ConfigError(
                f"{flag} and {pool_flags[0]}: both say what the pools are: keep one of them"
            )
    return CommandLine(pool=_pool(given)), rest


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    given: dict[str, str] = {}
    rest: list[str] = []
    todo = list(arguments)
    while todo:
        argument = todo.pop(0)
        if argument == "--":
            return given, [*rest, argument, *todo]
        flag, equals, value = argument.removeprefix("-").removeprefix("-").partition("=")
        key = _WITH_VALUE.get(flag) or _SWITCHES.get(flag)
        if not argument.startswith("-") or argument.startswith("---") or key is None:
            rest.append(argument)
            continue
        if flag in _SWITCHES:
            value = _bool(flag, value) if equals else "true"
        elif not equals:
            if not todo:
                raise ConfigError(f"-{flag}: needs a value")
            value = todo.pop(0)
        if given.setdefault(key, value) != value:
            raise ConfigError(f"-{flag}: is given twice, as {given[key]!r} and {value!r}: keep one")
    return given, rest


def _pool(given: dict[str, str]) -> PoolConfig:
    cdi = given.get("cdi") == "true"
    if "amount" in given:
        if "master" in given:
            raise ConfigError(
                "-master and -resource-amount: are of two plugins: keep -master for one HCA per "
                "id, -resource-amount for all HCAs to each holder"
            )
        resource = _resource(given.get("name", "ib.plugin/infiniband"))
        return PoolConfig(resource=resource, mode="all", amount=_amount(given["amount"]), cdi=cdi)
    resource = _resource(given.get("name", "tencent.com/rdma"))
    chosen: tuple[Selector, ...] = ()
    if master := given.get("master", ""):
        try:
            chosen = (parse_selector({"pfNames": [master + _EVERY_VF]}, "-master"),)
        except DocumentError:
            raise ConfigError(f"-master: {master!r}: is no interface's name") from None
    return PoolConfig(resource=resource, mode="exclusive", selectors=chosen, used="named", cdi=cdi)


def _resource(name: str) -> str:
    if problem := config.resource_problem(name):
        raise ConfigError(f"-resource-name: {name!r}: {problem}")
    return name


def _amount(text: str) -> int:
    amount = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else 0
    if not 1 <= amount <= 10_000:
        raise ConfigError(f"-resource-amount: {text!r}: expected a number from 1 to 10000")
    return amount


def _bool(flag: str, text: str) -> str:
    if text not in (*_TRUE, *_FALSE):
        raise ConfigError(f"-{flag}: {text!r}: expected true or false")
    return "true" if text in _TRUE else "false"
