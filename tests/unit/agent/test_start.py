"""The modules that an agent loads before its first call."""

import subprocess
import sys

from tests.plugins import CHECKOUT

HEAVY = (
    *("asyncio", "difflib", "grpc", "rich", "yaml"),
    *("gpu.limits.groups", "gpu.limit_service", "pynvml"),
)
SERVING = "import cli.agent, agent.resident, agent.leave_node, cli.setup.install"
LOADED = f"""
import sys
import cli.commands
{SERVING}
print(*(name for name in {HEAVY} if name in sys.modules))
"""


def test_an_agent_starts_without_what_no_call_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_other_commands_load_no_agent() -> None:
    script = LOADED.replace(SERVING, "import cli.main")
    script += "print(*(name for name in sys.modules if name.startswith(('agent', 'cni'))))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_a_probe_loads_no_plugin() -> None:
    script = "import sys; import cli.agent\n"
    script += "print(*(name for name in sys.modules if name.startswith(('cni', 'ipam', 'host'))))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
