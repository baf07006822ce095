"""What these tests ask of a kubelet they are told, however late."""

from tests.kubelet.patience import kubelet_may_take_its_time

__all__ = ["kubelet_may_take_its_time"]
