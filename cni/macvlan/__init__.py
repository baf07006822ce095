"""The CNI plugins `macvlan` and `ipvlan`: a child of an Ethernet interface, made in the pod.

`plugin` has the steps of each verb, in order. `options` reads the network configuration. `masters`
chooses the master. `offspring` makes, recognises, compares and removes the interface.
"""
