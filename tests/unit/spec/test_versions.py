"""Order of versions and the gates of the verbs, by the reference's pkg/version and pkg/skel."""

import pytest

from cni.spec import versions
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("", (0, 1, 0)),
        ("1", (1, 0, 0)),
        ("1.0", (1, 0, 0)),
        ("1.0.0", (1, 0, 0)),
        ("0.10.2", (0, 10, 2)),
    ],
)
def test_version_is_up_to_three_numbers(version: str, parts: versions.Parts) -> None:
    assert versions.parse(version) == parts


@pytest.mark.parametrize("version", ["adsf", "1.2.3.4", "1..2", ".", "1.0.0-rc1", " 1.0.0", "1.²"])
def test_anything_else_is_a_decoding_failure_that_quotes_it(version: str) -> None:
    with pytest.raises(CNIError) as caught:
        versions.parse(version)
    assert caught.value.code == Code.DECODING_FAILURE
    assert f'invalid version "{version}"' in caught.value.message


def test_order_is_by_number_and_not_by_text() -> None:
    assert versions.at_least("0.10.0", "0.9.0")
    assert versions.at_least("1.0", "1.0.0")
    assert not versions.at_least("0.3.1", "0.4.0")
    assert not versions.at_least("", "0.2.0")


@pytest.mark.parametrize(
    ("command", "version", "supported", "message"),
    [
        ("CHECK", "0.3.1", VERSIONS, "config version does not allow CHECK"),
        ("CHECK", "0.4.0", ("0.3.0",), "plugin version does not allow CHECK"),
        ("CHECK", "9.9.9", VERSIONS, "plugin version does not allow CHECK"),
        ("GC", "1.0.0", VERSIONS, "config version does not allow GC"),
        ("GC", "1.1.0", ("1.0.0",), "plugin version does not allow GC"),
        ("STATUS", "2.0.0", VERSIONS, "plugin version does not allow STATUS"),
    ],
)
def test_later_verbs_need_their_version_on_both_sides(
    command: str, version: str, supported: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CNIError) as caught:
        versions.require_verb(command, version, supported)
    assert (caught.value.code, caught.value.message) == (Code.INCOMPATIBLE_VERSION, message)
