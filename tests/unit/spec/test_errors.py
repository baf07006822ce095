"""The codes of errors."""

from cni.spec.errors import Code


def test_own_codes_begin_at_100() -> None:
    """SPEC.md: codes below 100 are the specification's; 8 is the reference's skel package's."""
    specified = {1, 2, 3, 4, 5, 6, 7, 8, 11, 50, 51}
    assert {code.value for code in Code if code < 100} == specified
