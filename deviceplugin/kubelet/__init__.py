"""The kubelet's interfaces: the device plugin API, registration, and the kubelet's records.

`plugin_server` answers the calls for one pool on a socket of `plugin_sockets`. `registration` keeps
the pool registered. `records` reads the ids of each container from the kubelet's files and from
`pod_resources`.
"""
