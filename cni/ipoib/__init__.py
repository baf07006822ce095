"""The CNI plugin `ipoib`: a child of an IPoIB parent, made in the pod.

`plugin` has the steps of each verb, in order. `options` reads the network configuration. `parents`
chooses the parent. `child` makes, configures, compares and removes the interface.
"""
