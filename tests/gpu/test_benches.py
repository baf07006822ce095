"""The benches that measure over the stand-in work, and print each figure that has a target.

Not what they measure: a machine that is busy may miss any target.
"""

import re
import subprocess
import sys

import pytest

from tests.host.gpu.pods import cgroup_root
from tools.compiling import CHECKOUT

NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
FIGURE = re.compile(
    rf"([a-z]+) +(.+): {NUMBER} (.+?)( \(x{NUMBER}\))? \| ({NUMBER} \3) \| (ok|miss)"
)
WITHOUT_RATIO = re.compile(
    "resident memory|CPU time|added among .* to that among 10|a process|another one|what a process"
)

SHIM = {
    "launch with the whole GPU, p50": "30 ns",
    "launch with the whole GPU, p99": "100 ns",
    **{
        f"cuMemAlloc and cuMemFree among {among} others, {of}": target
        for among in (10, 10000)
        for of, target in (("p50", "1000 ns"), ("p99", "10000 ns"))
    },
    "added among 10000 to that among 10, p50": "2 times",
    "cuGetProcAddress, p50": "200 ns",
    "cuInit, p50": "2 ms",
    **{
        f"{what} CUDA {version}'s runtime, CPU, p50": target
        for version in ("12.9", "13.5")
        for what, target in (("start of", "0.2 ms"), ("cuInit of", "2 ms"))
    },
    "resident memory without allocations": "1024 KiB",
    "resident memory for each live allocation": "64 bytes",
}
GATE = {
    "launch with the whole GPU, p50": "30 ns",
    "launch with the whole GPU, p99": "100 ns",
    "launch with a share, p50": "150 ns",
    "launch with a share, p99": "1000 ns",
    "launch with a share, timed (1 in 256), p50": "5000 ns",
    "launch with a share, timed (1 in 256), p99": "5000 ns",
}
INIT = {"cuInit alone, p50": "2 ms", "cuInit of 3 at once, p99 in all": "50 ms"}
AGENT = {
    **{
        f"CPU time{of}, 1 of 2 containers launch": "2 % of a CPU"
        for of in ("", " in the worst of 1 rounds")
    },
    "resident memory for each container, 1 of 2 containers launch": "200 KiB",
}
KILLS = {
    **{f"a process is known to be dead, {of}": "100 ms" for of in ("p50", "p99")},
    **{f"another one has the dead one's lock, {of}": "10 ms" for of in ("p50", "p99")},
    "what a process gets after all kills": "7.562 GiB",
}


@pytest.mark.parametrize(
    ("bench", "words", "targets"),
    [
        ("gpu_shim", "--short", SHIM),
        ("gpu_gate", "--short", GATE),
        ("gpu_registration", "--count 3 --rounds 1", INIT),
        ("gpu_agent", "--tenants 2 --working 1 --seconds 0.2 --scrape 0.1 --rounds 1", AGENT),
        ("gpu_kills", "--kills 2", KILLS),
    ],
)
def test_each_target_has_a_line_with_its_figure(
    bench: str, words: str, targets: dict[str, str]
) -> None:
    if bench in ("gpu_registration", "gpu_agent", "gpu_kills"):
        cgroup_root(2)  # skips the test where there is none
    command = [sys.executable, "-m", f"bench.{bench}", *words.split()]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = [match for line in done.stdout.splitlines() if (match := FIGURE.fullmatch(line))]
    assert {match[2]: match[5] for match in found} == targets, done.stdout
    for match in found:
        assert bool(match[4]) != bool(WITHOUT_RATIO.match(match[2])), match[0]
