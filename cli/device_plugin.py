"""`podfabric device-plugin`: the device plugin alone, where the agent does not serve it.

With the command lines of the plugins that it takes the place of (docs/pools.md).
"""

import logging
import os
import signal
import sys
import threading
from functools import partial

USAGE = """\
usage: podfabric device-plugin [-config FILE]
       podfabric device-plugin -config-file FILE [-resource-prefix DOMAIN] [-use-cdi]
       podfabric device-plugin -resource-name NAME [-resource-amount N | -master INTERFACE]

Offer the HCAs of this node to the kubelet until SIGTERM. Without flags the pools are those of
/etc/podfabric/config.yaml; FILE counts in its place, and may be another device plugin's: see
docs/pools.md.
"""


def run(given: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    from agent import logs, settings
    from base.paths import Paths
    from cni.attachments import pod_choices
    from deviceplugin.pools.config import ConfigError
    from deviceplugin.pools.flags import parse_command_line
    from deviceplugin.service import Service

    paths = Paths.from_environ(os.environ)
    if any(flag in given for flag in ("-h", "-help", "--help")):
        sys.stdout.write(USAGE)
        return 0
    try:
        command, rest = parse_command_line(given)
        if rest:
            raise ConfigError(f"{rest[0]}: unknown flag\n{USAGE}")
        command.load(paths.config)  # a mistake of the command line is told at once
        # How to log is in the same file.
        logs.configure(settings.load(command.watched(paths.config) or paths.config))
    except (ConfigError, settings.SettingsError) as error:
        sys.stderr.write(f"podfabric device-plugin: {error}\n")
        return 2
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    service = Service(
        paths,
        lambda: command.load(paths.config),
        command.watched(paths.config),
        partial(pod_choices.prune, paths),
    )
    service.start()
    ended.wait()
    service.close()
    logging.getLogger(__name__).info("stopped")
    return 0
