"""`podfabric device-plugin`: runs the device plugin without the agent.

Also accepts the command lines of the device plugins that podfabric replaces (docs/use/devices.md).
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

from msgspec.structs import asdict

from cli.arguments import meant

USAGE = """\
usage: podfabric device-plugin [-config FILE]
       podfabric device-plugin -config-file FILE [-resource-prefix DOMAIN] [-use-cdi]
       podfabric device-plugin -resource-name NAME [-resource-amount N | -master INTERFACE]
       podfabric device-plugin -gpu-duplication-factor N [-host-path DIR] [-container-path DIR]
                               [-plugin-directory DIR]

Offer the HCAs and GPUs of this node to the kubelet until SIGTERM. Without flags the pools come from
/etc/podfabric/config.yaml. FILE replaces it, and may be the configuration of another device
plugin: see docs/use/devices.md.
"""


def run(arguments: Sequence[str]) -> int:
    from agent import settings
    from agent.observe import logs
    from base.paths import Paths, PathsWithSockets
    from cni.attachments import pod_choices
    from deviceplugin.pools.flags import FLAGS, parse_command_line
    from deviceplugin.pools.pool_config import ConfigError
    from deviceplugin.service import Service

    paths = Paths.from_environ(os.environ)
    if any(flag in arguments for flag in ("-h", "-help", "--help")):
        sys.stdout.write(USAGE)
        return 0
    try:
        command, rest = parse_command_line(list(arguments))
        if rest:
            hint = meant(rest[0].partition("=")[0], [f"-{flag}" for flag in FLAGS])
            raise ConfigError(f"{rest[0]}: unknown flag{hint}\n{USAGE}")
        command.load(paths.config)  # raises ConfigError for a wrong command line
        # The same file has the settings of the log.
        loaded = settings.load(command.watched(paths.config) or paths.config)
        if "agent" in loaded.mistakes:
            raise ConfigError(loaded.mistakes["agent"])
        logs.configure(loaded.settings)
        if command.plugin_directory is not None:
            paths = PathsWithSockets(**asdict(paths), sockets=command.plugin_directory)
    except ConfigError as error:
        sys.stderr.write(f"podfabric device-plugin: {error}\n")
        return 2
    # Not an Event: `Event.set` needs a lock that the interrupted `wait` may hold.
    ended: SimpleQueue[None] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.put(None))
    service = Service(
        paths,
        lambda: command.load(paths.config),
        command.watched(paths.config),
        partial(pod_choices.prune, paths),
    )
    service.start()
    ended.get()
    service.close()
    logging.getLogger(__name__).info("stopped")
    return 0
