"""The kubelet of these tests may answer late."""

from tests.kubelet.patience import kubelet_may_take_its_time

__all__ = ["kubelet_may_take_its_time"]
