"""A stand-in for the kubelet's device manager, for any device plugin.

It has the kubelet's sockets and its checkpoint below a root directory, and calls a plugin in the
kubelet's order. It uses only the generated protocol of the project.
"""

from tests.kubelet.devices import NotStarted, PodRejected, Request
from tests.kubelet.kubelet import Kubelet, Pod

__all__ = ["Kubelet", "NotStarted", "Pod", "PodRejected", "Request"]
