"""The kubelet: the device plugin API on sockets, registration, and the kubelet's records.

`plugin_server` answers for one pool on one of `plugin_sockets`, `registration` keeps the pool
registered. `records` reads the holders of ids, and `pod_resources` asks the kubelet for them.
"""
