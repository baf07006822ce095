"""Where the notes of a call go."""

import threading

import pytest

from cni.spec.notes import MAX_BYTES, collected, note


def test_a_note_of_a_process_is_a_line_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note("one")
    note("two")
    assert capsys.readouterr().err == "one\ntwo\n"


def test_notes_of_a_call_are_collected_and_not_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with collected() as outer:
        note("one")
        with collected() as inner:
            note("two")
        note("three")
    note("four")
    assert outer.text == "one\nthree\n"
    assert inner.text == "two\n"
    assert capsys.readouterr().err == "four\n"


def test_calls_in_other_threads_have_notes_of_their_own() -> None:
    texts = {}
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        with collected() as notes:
            barrier.wait()
            note(f"of {number}")
            barrier.wait()
            texts[number] = notes.text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"of {number}\n" for number in range(4)}


def test_a_call_that_notes_without_end_is_cut_and_says_so_once() -> None:
    with collected() as notes:
        for _ in range(1000):
            note("x" * 1000)
    assert len(notes.text) <= MAX_BYTES + 100
    assert notes.text.count("left out") == 1
    assert notes.text.endswith("(further notes are left out)\n")


def test_a_note_that_is_no_utf8_is_collected() -> None:
    with collected() as notes:
        note("\udcff")
    assert notes.text == "\udcff\n"
