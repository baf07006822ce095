"""Names of groups: of directories, of CDI devices and of their files."""

from gpu.pools.container_files import group_of


def test_group_is_named_after_resource_and_slot() -> None:
    assert group_of("a.io/gpu-10g-25", "3f2a91c4.10g-25.0") == "a.io-gpu-10g-25.3f2a91c4.10g-25.0"
    assert group_of("../x", "y/z") == "..-x.y-z"


def test_long_names_are_cut_and_stay_different() -> None:
    resource = f"{'d' * 200}.io/{'n' * 60}"
    names = {group_of(resource, f"slot.{number}") for number in range(20)}
    assert len(names) == 20
    assert max(map(len, names)) == 200
