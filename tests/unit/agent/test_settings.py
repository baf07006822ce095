"""config.yaml: its keys, the texts of its mistakes, and reading it again after a change."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import settings
from agent.settings import Loaded, Settings, listen_address
from base import documents
from base import watching as file_watch
from base.watching import WatchedFile
from cni.spec.errors import CNIError
from tests.waiting import PATIENCE, until


class Mistake(Exception):
    """Of the first section that has one."""


def load(path: Path) -> Settings:
    return without_mistake(settings.load(path))


def parse(content: bytes, name: str) -> Settings:
    return without_mistake(settings.parse(content, name))


def without_mistake(loaded: Loaded) -> Settings:
    for text in loaded.mistakes.values():
        raise Mistake(text)
    assert not loaded.unread
    return loaded.settings


def test_no_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(tmp_path / "absent/config.yaml") == Settings()
    assert load(tmp_path / "config.yaml") == Settings()


NEVER = 10 * PATIENCE  # seconds until a look that no event asks for


@pytest.mark.parametrize(
    "content", [b"", b"# nothing yet\n", b"agent:\n", b"pools: [{a: 1}]", b"{}"]
)
def test_a_file_that_says_nothing_is_all_defaults(content: bytes) -> None:
    assert parse(content, "config.yaml") == Settings()


def test_every_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "pools: {any: thing}\n"
        "agent:\n  workers: 3\n  deadline: 20\n  grace: 0.5\n  connections: 9\n  log_format: json\n"
        '  log_level: debug\n  listen: "unix:/run/x"\n  sweep: false\n'
    )
    assert load(path) == Settings(
        workers=3,
        deadline=20.0,
        grace=0.5,
        connections=9,
        log_format="json",
        log_level="debug",
        listen="unix:/run/x",
        sweep=False,
    )


def test_json_is_read_as_json() -> None:
    assert parse(b'{"agent":\n\t{"deadline": 1e2, "workers": 3}}', "f") == Settings(workers=3)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"agnet: {}", 'f: agnet: unknown key: did you mean "agent"?'),
        (b"x: {}", "f: x: unknown key: valid keys are agent, configList, gpuLimits, "),
        (b"workers: 3", 'f: workers: unknown key: it belongs below "agent"'),
        (b"agent: {wokers: 3}", 'f: agent.wokers: unknown key: did you mean "workers"?'),
        (b"agent: {logLevel: info}", 'f: agent.logLevel: unknown key: did you mean "log_level"?'),
        (b"agent: {zzz: 3}", "f: agent.zzz: unknown key: valid keys are connections, deadline, "),
        (b"agent: {workers: 0}", "f: agent.workers: 0: expected int >= 1"),
        (b"agent: {workers: 257}", "f: agent.workers: 257: expected int <= 256"),
        (b"agent: {workers: '3'}", "f: agent.workers: '3': expected int, got str"),
        (b"agent: {workers: true}", "f: agent.workers: True: expected int, got bool"),
        (b"agent: {workers: }", "f: agent.workers: None: expected int, got null"),
        (b"agent: {deadline: .nan}", "f: agent.deadline: nan: expected a number"),
        (b"agent: {deadline: .inf}", "f: agent.deadline: inf: expected float <= 600"),
        (b"agent: {grace: -1}", "f: agent.grace: -1: expected float >= 0"),
        (b"agent: {sweep: 1}", "f: agent.sweep: 1: expected bool, got int"),
        (
            b"agent: {log_level: loud}",
            "f: agent.log_level: 'loud': expected one of debug, info, warning, error",
        ),
        (b"agent: {listen: 9810}", "f: agent.listen: 9810: expected str, got int"),
        (
            b"agent: {listen: '0.0.0.0:1'}",
            "f: agent.listen: '0.0.0.0:1': the endpoint does not authenticate",
        ),
        (b"agent: [3]", "f: agent: expected keys with values, got [3]"),
        (b"3", "f: expected keys with values, got 3"),
        (b"1: 2", "f: 1: unknown key"),
        (b"agent: {1: 2}", "f: agent: 1: unknown key"),
        (b"agent: {sweep: true}\nagent: {}", "f: line 2: agent: appears twice: keep one"),
        (b"agent: {sweep: true, sweep: false}", "f: line 1: sweep: appears twice: keep one"),
        (b"agent: {? [a] : 2}", "f: line 1, column 11: neither YAML nor JSON: found unhashable"),
        (b"a: b: c", "f: line 1, column 5: neither YAML nor JSON: mapping values are not"),
        (b"--- 1\n--- 2\n", "f: line 2, column 1: neither YAML nor JSON: "),
        (b"\xff\xfe\xff", "f: neither YAML nor JSON: "),
        (b"agent: {deadline: 2026-99-99}", "f: neither YAML nor JSON: month must be"),
        (b"agent: !!python/name:os.system", "f: line 1, column 8: neither YAML nor JSON: could"),
        (b"[" * 100_000, "f: nested too deeply"),
        (b"agent: &a [*a]", "f: agent: expected keys with values, got [[...]]"),
    ],
)
def test_a_mistake_is_named(content: bytes, error: str) -> None:
    with pytest.raises(Mistake) as raised:
        parse(content, "f")
    assert str(raised.value).startswith(error)
    assert "\n" not in str(raised.value)


@given(st.binary(max_size=60) | st.text("agent:workers {}[]&*!'\"\n\t-1.#|>?,", max_size=60))
def test_any_content_is_settings_or_an_error(content: bytes | str) -> None:
    try:
        parse(content if isinstance(content, bytes) else content.encode(), "f")
    except Mistake as error:
        assert str(error).startswith("f: ")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(Mistake, match=f"^{path}: "):
            load(path)
    large = tmp_path / "large"
    large.write_bytes(b"#" * (documents.MAX_BYTES + 1))
    with pytest.raises(Mistake, match="is larger than"):
        load(large)


@pytest.mark.parametrize(
    ("listen", "meaning"),
    [
        ("", None),
        ("127.0.0.1:9810", ("127.0.0.1", 9810)),
        ("127.1.2.3:0", ("127.1.2.3", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("unix:/run/podfabric/http.sock", Path("/run/podfabric/http.sock")),
    ],
)
def test_listen_is_loopback_or_a_path(listen: str, meaning: object) -> None:
    assert listen_address(listen) == meaning


@pytest.mark.parametrize(
    "listen",
    [
        *("0.0.0.0:1", "10.0.0.1:1", "[::]:1", "[fe80::1]:1", "localhost:1", ":1", "127.0.0.1"),
        *("127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:1²"),
        *("::1:1", "[127.0.0.1]:1", "[::1]", "unix:", "unix:relative", "unix:/" + "x" * 107),
    ],
)
def test_listen_is_nothing_else(listen: str) -> None:
    with pytest.raises(ValueError, match=r"write|allowed|at most"):
        listen_address(listen)


@contextmanager
def watching(
    path: Path, look_every: float = NEVER, current: Settings | None = None
) -> Iterator[list[Settings]]:
    changes: list[Settings] = []
    last = Loaded(current) if current is not None else settings.load(path)

    def changed() -> None:
        nonlocal last
        before, last = last, settings.reload(path, last)
        if last != before and not last.mistakes:
            changes.append(last.settings)

    with closing(WatchedFile(path, changed, look_every)):
        time.sleep(2 * file_watch.SETTLE)  # its first look is over: what comes is seen as it comes
        yield changes


def replace(path: Path, text: str) -> None:
    path.with_name(".new").write_text(text)
    path.with_name(".new").replace(path)


def overwrite(path: Path, text: str) -> None:
    """Write in place, in one step: the file is never empty, which would mean the defaults."""
    with path.open("r+b", buffering=0) as file:
        file.write(text.encode())


def test_a_change_in_place_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("agent: {workers: 2}")
    with watching(path) as changes:
        overwrite(path, "agent: {workers: 3}")
        until(lambda: changes == [Settings(workers=3)])


def test_a_file_that_is_replaced_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with watching(path) as changes:
        replace(path, "agent: {workers: 3}")
        until(lambda: changes == [Settings(workers=3)])
        replace(path, "agent: {workers: 4}")
        until(lambda: changes[1:] == [Settings(workers=4)])


def test_a_config_map_that_is_swapped_is_seen(tmp_path: Path) -> None:
    def put(version: str, text: str) -> None:
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text(text)
        (tmp_path / "..data_tmp").symlink_to(version)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    put("..2026_1", "agent: {workers: 2}")
    path = tmp_path / "config.yaml"
    path.symlink_to("..data/config.yaml")
    with watching(path) as changes:
        put("..2026_2", "agent: {workers: 3}")
        until(lambda: changes == [Settings(workers=3)])


def test_a_file_that_goes_is_the_defaults_again(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("agent: {workers: 2}")
    with watching(path) as changes:
        path.unlink()
        until(lambda: changes == [Settings()])


def test_a_directory_that_comes_later_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "etc/config.yaml"
    with watching(path, look_every=0.2) as changes:
        path.parent.mkdir()
        path.write_text("agent: {workers: 3}")
        until(lambda: changes == [Settings(workers=3)])
        path.parent.rename(tmp_path / "old")
        until(lambda: changes[1:] == [Settings()])
        path.parent.mkdir()
        path.write_text("agent: {workers: 4}")
        until(lambda: changes[2:] == [Settings(workers=4)])


def test_a_links_target_that_changes_elsewhere_is_seen(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    target = tmp_path / "target"
    target.write_text("agent: {workers: 2}")
    path = tmp_path / "etc/config.yaml"
    path.symlink_to(target)
    with watching(path, look_every=0.2) as changes:
        overwrite(target, "agent: {workers: 3}")
        until(lambda: changes == [Settings(workers=3)])


def test_a_change_before_the_watch_counts(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("agent: {workers: 3}")
    with watching(path, current=Settings()) as changes:
        until(lambda: changes == [Settings(workers=3)])


def test_without_inotify_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(file_watch, "INotify", refused)
    path = tmp_path / "config.yaml"
    with watching(path, look_every=0.2) as changes:
        path.write_text("agent: {workers: 3}")
        until(lambda: changes == [Settings(workers=3)])


def test_a_broken_file_leaves_the_settings_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("agent: {workers: 2}")
    caplog.set_level(logging.INFO)
    with watching(path) as changes:
        replace(path, "agent: {workers: 0}")
        until(lambda: "agent.workers: 0: expected int >= 1" in caplog.text)
        assert changes == []
        replace(path, "agent: {workers: 2}")
        until(lambda: "can be used again" in caplog.text)
    assert changes == [Settings(workers=2)]
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "(until it is corrected: agent: the last correct settings stay)" in caplog.messages[0]


GOOD = b"agent: {workers: 2}\npolicy: {set: {pfOnly: [true]}}\nipam: {scope: cluster}\n"
WRONG = {
    "agent": b"agent: {workers: 0}\n",
    "policy": b"policy: {whole_pf: true}\n",
    "ipam": b"ipam: {scope: all}\n",
}


@pytest.mark.parametrize("content", [b"agents: {}\n", b"policy: [\n", b"- 1\n"])
def test_a_mistake_outside_of_all_sections_changes_nothing(content: bytes) -> None:
    before = settings.parse(GOOD, "f")
    loaded = settings.parse(content, "f", before)
    assert loaded.settings == before.settings
    assert set(loaded.mistakes) == set(settings.SECTIONS)
    assert not loaded.unread


def test_a_section_that_was_never_read_is_unread_until_it_is() -> None:
    loaded = settings.parse(b"".join(WRONG.values()), "f")
    assert (loaded.settings, loaded.unread) == (Settings(), frozenset(WRONG))
    loaded = settings.parse(WRONG["policy"] + b"agent: {workers: 2}\n", "f", loaded)
    assert (loaded.settings, loaded.unread) == (Settings(workers=2), frozenset({"policy"}))
    with pytest.raises(CNIError, match=r"policy.whole_pf: unknown key.*nothing was done"):
        loaded.require("policy")
    loaded.require("ipam")
    loaded = settings.parse(GOOD, "f", loaded)
    assert (loaded.mistakes, loaded.unread) == ({}, frozenset())
    assert settings.parse(WRONG["policy"], "f", loaded).unread == frozenset()


def test_the_log_tells_what_changed_and_what_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    caplog.set_level(logging.INFO)
    with watching(path) as changes:
        path.write_text('agent: {workers: 3, listen: ""}')
        until(lambda: len(changes) == 1)
    assert caplog.messages == [
        f"{path}: workers was 64, is 3; "
        "listen was '127.0.0.1:9810', is '' (when the agent starts again)"
    ]


def test_half_a_file_is_not_taken_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("agent: {workers: 2}")
    with watching(path, look_every=0.02) as changes:
        monkeypatch.setattr(file_watch, "SETTLE", 3.0)
        with path.open("w") as file:  # empty: the defaults, if it was read now
            for part in ("agent:\n", "  workers: 3\n", "  deadline: 9\n"):
                time.sleep(0.1)
                file.write(part)
                file.flush()
        until(lambda: bool(changes))
    assert changes == [Settings(workers=3, deadline=9.0)]


def test_the_watch_ends_at_once_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    watched = WatchedFile(tmp_path / "config.yaml", print, NEVER)
    watched.close()
    watched.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before  # others' may have been closed
