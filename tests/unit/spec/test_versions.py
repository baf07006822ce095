"""Order of versions and the gates of the verbs, by the reference's pkg/version and pkg/skel."""

import pytest

from cni.spec import versions
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
