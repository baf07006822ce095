"""Runs the operator's commands on made-up servers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from base.paths import Paths
from cli.commands import run
from tools.use_it import kept_at, printed_at, shown, without_chance

MEND = "see what `python -m tools.use_it` changes"
_IN_MEMORY = Path("/dev/shm")  # a server has 800 files


@contextmanager
def short_path() -> Iterator[Path]:
    """As tmp_path, with room for a socket's name in the 107 bytes that it may have."""
    memory = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    with TemporaryDirectory(prefix="pf", dir=memory) as directory:
        yield Path(directory)


class Printed(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def document(self) -> Any:  # noqa: ANN401
        """The output of `--output json`."""
        return json.loads(self.out)


class Shell:
    """The commands, on the server whose files `paths` has."""

    def __init__(
        self, paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._capsys = capsys
        self._paths = paths
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        for field in Paths.__struct_fields__:
            monkeypatch.setenv(f"PODFABRIC_{field.upper()}", str(getattr(paths, field)))

    def __call__(self, *given: str) -> Printed:
        """One command line; one that argparse refuses ends with its code, too."""
        self._capsys.readouterr()
        try:
            code = run(list(given))
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            code = ended.code
        return Printed(code, *self._capsys.readouterr())

    def as_shown(self, command: str) -> None:
        """Run the command, which must print what a document shows."""
        assert shown().get(command) == self._printed(command), MEND

    def as_kept(self, command: str) -> None:
        """Run the command, which must print the text in the folder `printed`."""
        assert kept_at(command).read_text() == self._printed(command), MEND

    def _printed(self, command: str) -> str:
        """The output with the usual directories, also in a file for `python -m tools.use_it`."""
        out = without_chance(self(*command.split()[1:]).out)
        usual = Paths()
        for field in sorted(Paths.__struct_fields__, key=len, reverse=True):
            out = out.replace(str(getattr(self._paths, field)), str(getattr(usual, field)))
        printed_at(command).parent.mkdir(parents=True, exist_ok=True)
        printed_at(command).write_text(out)
        return out
