"""The CNI plugin `ipoib`: a child of an IPoIB parent, moved into the pod.

`plugin` is what happens to a pod, in order. `options` reads the network configuration, `parents`
chooses the parent, `child` is the interface itself, `child_check` compares it.
"""
