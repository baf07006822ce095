"""The runner of the virtual machine, with programs in place of QEMU."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kernel.vm import layout, qemu
from tests.waiting import PATIENCE

UP = "echo '[ 7.4] guest: command starts' >> {share}/console.log; echo output >&{output}; "


class Program(qemu.Machine):
    """A machine that is a shell script; `boots` counts its starts."""

    script = ""

    def arguments(self, share: Path, output: int, wire: tuple[int, int]) -> list[str]:
        script = f"echo >> {layout.BUILD}/boots; {self.script}"
        return ["bash", "-c", script.format(share=share, output=output)]


@pytest.fixture(autouse=True)
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(layout, "BUILD", tmp_path)
    monkeypatch.setattr(layout, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(qemu, "UP_WITHIN", PATIENCE)
    return tmp_path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does not boot is given up soon."""
    monkeypatch.setattr(qemu, "UP_WITHIN", 4.0)


def boots(build: Path) -> int:
    return len((build / "boots").read_text())


def run(script: str, command: Sequence[str] = ("true",), timeout: float = PATIENCE) -> int:
    machine = Program(timeout=timeout)
    machine.script = script
    return qemu.run(command, machine)


def test_status_and_output_are_the_commands(build: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(UP + "sleep 2; echo 3 > {share}/status") == 3
    assert boots(build) == 1
    assert "output" in capfd.readouterr().out
    assert (build / "results/output.log").read_text() == "output\n"


def test_machine_that_does_not_boot_is_started_again(build: Path, impatient: None) -> None:
    hanging = f"if [ $(wc -l < {build}/boots) -lt 3 ]; then exec sleep 600; fi; "
    assert run(hanging + UP + "echo 0 > {share}/status") == 0
    assert boots(build) == 3


def test_emulator_that_fails_while_it_boots_is_started_again(build: Path) -> None:
    failing = f"if [ $(wc -l < {build}/boots) -lt 3 ]; then kill -ABRT $$; fi; "
    assert run(failing + UP + "echo 0 > {share}/status") == 0
    assert boots(build) == 3


def test_emulator_that_fails_after_the_command_began_is_not_restarted(build: Path) -> None:
    assert run(UP + "kill -ABRT $$") == 125
    assert boots(build) == 1


def test_machine_that_never_boots_is_an_error(
    build: Path, impatient: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("exec sleep 600") == 125
    assert boots(build) == qemu.BOOTS
    assert "it is given up" in capfd.readouterr().err


def test_command_that_does_not_end_is_timed_out(build: Path) -> None:
    assert run(UP + "exec sleep 600", timeout=3.0) == 124
    assert boots(build) == 1


def test_machine_that_ends_before_the_command_is_not_restarted(build: Path) -> None:
    assert run("echo 'Kernel panic' >> {share}/console.log") == 125
    assert boots(build) == 1
