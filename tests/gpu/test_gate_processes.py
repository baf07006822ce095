"""The gate of compute shares between processes of one group, by the real clock."""

import statistics
import threading
import time
from pathlib import Path

from tests import waiting
from tests.gpu.gate import MS, UNKNOWN, WHOLE, Files, S

LAUNCHES = 1_000_000  # of each process, enough that the processes overlap


def test_four_processes_lose_no_payment_of_each_other(tmp_path: Path) -> None:
    files = Files(tmp_path, share=5000)
    files.set_most_debt(3600 * S)
    start = time.monotonic_ns() + 100 * S
    files.set_tat(start)  # in the future, so that each launch moves it by its price exactly
    processes = [files.start("spared", LAUNCHES) for _ in range(4)]
    assert [process.wait(waiting.PATIENCE) for process in processes] == [0] * 4
    assert files.gpu().tat - start == 4 * LAUNCHES * 2 * UNKNOWN


def _wakes(files: Files, after: float) -> int:
    """Change the share `after` seconds after a wait has begun. Returns the ns until the launch."""
    files.set_share(1)
    began = time.monotonic_ns()
    files.set_tat(began + 3600 * S)
    process = files.start("held", 1)
    waiting.until(lambda: files.gpu().backlogged_at > began, what="launch that waits", pause=0.005)
    time.sleep(after)
    assert process.poll() is None
    changed = time.monotonic_ns()
    files.set_share(WHOLE)
    _, launched = process.communicate(timeout=waiting.PATIENCE)[0].split()
    return int(launched) - changed


def test_a_process_that_waits_sees_a_new_share_within_100_ms(tmp_path: Path) -> None:
    """The median of changes all over the 100 ms after which a process looks again.

    The last of them take as long as that, and on a busy machine who wakes up waits for a CPU, too.
    """
    files = Files(tmp_path, share=1)
    files.set_most_debt(3600 * S)
    assert statistics.median(_wakes(files, n * 0.009) for n in range(11)) <= 100 * MS


def test_processes_that_waited_for_as_long_as_they_may_are_held_back_on(tmp_path: Path) -> None:
    """Each launch has to wait 200 ms, but no launch waits longer than the cap. No agent runs."""
    files = Files(tmp_path, share=1)
    cap = 50 * MS
    files.set_most_debt(cap)
    processes = [files.start("held", 5) for _ in range(2)]
    times = [int(line) for process in processes for line in process.communicate()[0].split()]
    assert [process.returncode for process in processes] == [0, 0]
    assert max(times) - min(times) >= 9 * cap - 20 * MS  # less the burst


def test_signals_do_not_shorten_a_wait(tmp_path: Path) -> None:
    files = Files(tmp_path, share=100)
    until = time.monotonic_ns() + S
    files.set_tat(until)
    process = files.start("held", 1)
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.01):
            process.send_signal(23)  # SIGURG: ignored, and it ends system calls of a handler's

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    printed = process.communicate()[0].split()
    stop.set()
    waiting.join(disturbing)
    assert int(printed[1]) >= until
