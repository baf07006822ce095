"""Which tier enforces limits, and when a GPU must not be given."""

import pytest

from gpu.tiers import Obstacle, Tier, choose

OLD = "driver 580.65.06 has no memory limits of cgroups"


def no() -> str | None:
    return OLD


def yes() -> str | None:
    return None


OLD_DRIVER: dict[Tier, Obstacle] = {"kernel": no, "shim": yes}
NEW_DRIVER: dict[Tier, Obstacle] = {"kernel": yes, "shim": yes}


def test_the_strongest_tier_that_can_be_had_is_taken() -> None:
    assert choose(NEW_DRIVER, {"kernel", "shim"}).tier == "kernel"
    choice = choose(OLD_DRIVER, {"kernel", "shim", "none"})
    assert (choice.tier, choice.refused, choice.unhealthy) == ("shim", {"kernel": OLD}, None)


def test_a_tier_that_is_not_allowed_is_not_taken() -> None:
    assert choose(NEW_DRIVER, {"shim"}).tier == "shim"
    assert choose(NEW_DRIVER, {"none"}).tier == "none"


def test_a_gpu_whose_tier_is_weaker_than_required_must_not_be_given() -> None:
    choice = choose(OLD_DRIVER, {"kernel", "shim"}, "kernel")
    assert choice.unhealthy == (
        "limits must be enforced by kernel or stronger (require), and only shim can be had: "
        f"kernel: {OLD}"
    )
    assert choose(NEW_DRIVER, {"kernel", "shim"}, "kernel").unhealthy is None
    assert choose(NEW_DRIVER, {"kernel"}, "shim").unhealthy is None
    missing = choose(NEW_DRIVER, {"shim"}, "kernel").unhealthy
    assert missing is not None and missing.endswith("enforce does not allow kernel")


@pytest.mark.parametrize("tier", ["mig", "mps"])
def test_a_tier_that_this_version_does_not_have_is_said_to_be_missing(tier: Tier) -> None:
    choice = choose(NEW_DRIVER, {tier}, tier)
    assert choice.tier == "none"
    assert choice.unhealthy is not None and "does not have it" in choice.unhealthy
