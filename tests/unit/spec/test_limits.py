"""How much a configuration may hold: refused by its place, and cheap to look at."""

import json
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni.spec import limits
from cni.spec.errors import CNIError, Code
from cni.spec.request import MAX_CONFIG_BYTES
from tests.unit.spec.hostile import HOSTILE

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:é\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\[', max_size=3), inner)
    ),
    max_leaves=30,
)


def refused(raw: bytes, look: Callable[[bytes], object] = limits.decode) -> CNIError:
    with pytest.raises(CNIError) as caught:
        look(raw)
    return caught.value


def nested(levels: int) -> bytes:
    """An object and that many levels less one of lists in it."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def listing(values: int) -> bytes:
    """An object that holds `values` values: a list and its items."""
    return json.dumps({"a": [1] * (values - 1)}).encode()


def depth_of(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


@given(JSON)
def test_ordinary_configuration_passes_however_it_is_written(value: object) -> None:
    for raw in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode()):
        if depth_of(value) <= limits.MAX_DEPTH:
            limits.decode(raw)
        limits.require_readable(raw)


@given(JSON, st.integers(1, 40), st.integers(0, 5))
def test_depth_is_that_of_the_decoded_value_with_any_strings(
    value: object, part: int, allowed: int
) -> None:
    raw = json.dumps(value).encode()
    # Small parts, so that strings and escapes are cut everywhere.
    depth = limits.depth_of(raw, allowed, len(raw), part)
    assert depth == depth_of(value) or depth <= allowed >= depth_of(value)


def test_what_is_just_within_each_limit_passes() -> None:
    limits.decode(nested(limits.MAX_DEPTH))
    limits.decode(listing(limits.MAX_VALUES))
    limits.decode(json.dumps({"k" * limits.MAX_KEY: "x" * limits.MAX_TEXT}).encode())
    limits.decode(b"{}" + b" " * (limits.MAX_BYTES - 2))
    limits.decode(b'{"a":"' + b"\\n" * 10_000 + b'"}')


@pytest.mark.parametrize(
    ("raw", "place", "limit"),
    [
        (b"{}" + b" " * limits.MAX_BYTES, "1048578 bytes", "1048576"),
        (listing(limits.MAX_VALUES + 1), "values", "10000"),
        (b'{"a":[' + b'"",' * 20_000 + b'""]}', "values", "10000"),
        (b'{"x":[1,' + nested(32) + b"]}", '"x[1].a[0][0]', "32"),
        (b'{"x":[1,{"y":"' + b"x" * 16_385 + b'"}]}', '"x[1].y" has 16385 characters', "16384"),
        (b'{"x":{"' + b"k" * 257 + b'":1}}', 'kkk": the key has 257 characters', "256"),
        (b'{"a":"' + b"\\n" * 70_000 + b'"}', "backslashes", "65536"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_by_its_place(raw: bytes, place: str, limit: str) -> None:
    error = refused(raw)
    assert error.code == Code.INVALID_CONFIG
    assert place in error.message
    assert limit in error.message


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (b'{"name":"a","name":"b"}', "name"),
        (b'{"ipam":{"range":"a","x":{},"range":"b"}}', "ipam.range"),
        (
            b'{"ipam":{"ranges":[[{"subnet":1}],[{},{"subnet":1,"subnet":2}]]}}',
            "ipam.ranges[1][1].subnet",
        ),
        (b'{"a":1,"\\u0061":2}', "a"),
        (b'{"x":[' + b'"%s",' % (b"y" * 10_000) * 3 + b'{"a":1,"a":1}]}', "x[3].a"),
    ],
)
def test_key_that_stands_twice_is_refused_by_its_place(raw: bytes, place: str) -> None:
    error = refused(raw)
    assert error.code == Code.INVALID_CONFIG
    assert error.message == f'"{place}" occurs twice: remove one of them'


@pytest.mark.parametrize("look", [limits.decode, limits.require_readable])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_that_overflows_a_decoder_is_refused_to_every_verb(
    look: Callable[[bytes], object], opening: bytes
) -> None:
    error = refused(b'{"a":' + opening * 5000, look)
    assert error.code == Code.DECODING_FAILURE
    assert "nested too deeply" in error.message


def test_del_reads_what_an_add_may_not() -> None:
    for raw in (nested(400), listing(50_000), b'{"a":1,"a":2}', b'{"a":"' + b"x" * 100_000 + b'"}'):
        limits.require_readable(raw)


def test_ordinary_configuration_costs_at_most_ten_times_its_decoding() -> None:
    ranges = [{"range": f"10.{i}.0.0/24", "exclude": ["10.0.0.1/32"]} for i in range(17)]
    raw = json.dumps({"name": "n", "master": "ib0", "ipam": {"ipRanges": ranges}}).encode()
    assert 800 < len(raw) < 1200
    assert _cost(limits.decode, raw, 2000) < 10 * _cost(json.loads, raw, 2000)


LARGE = json.dumps({f"key{i}": ["10.0.0.1/32"] * 4 for i in range(limits.MAX_BYTES // 80)}).encode()


@pytest.mark.slow
@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_mebibyte_costs_at_most_five_times_the_decoding_of_a_harmless_one(
    raw: bytes,
) -> None:
    assert _cost(limits.decode, raw) < 5 * _cost(json.loads, LARGE)


def _cost(look: Callable[[bytes], object], raw: bytes, tries: int = 20) -> float:
    """The least CPU time of several tries, in seconds."""
    best = math.inf
    for _ in range(tries):
        started = time.thread_time()
        with suppress(CNIError):
            look(raw)
        best = min(best, time.thread_time() - started)
    return best


def test_documentation_has_every_limit() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/reference/configuration.md").read_text()
    text = page.partition("## Limits of a network configuration")[2]
    listed = {int(number) for number in re.findall(r"^- .*: (\d+)$", text, re.MULTILINE)}
    constants = {
        value for name, value in vars(limits).items() if name.isupper() and name[0] != "_"
    } - {limits.MAX_PATH, limits.READABLE_DEPTH}
    assert listed == constants | {MAX_CONFIG_BYTES}
    assert f"nested more than {limits.READABLE_DEPTH} deep" in text
