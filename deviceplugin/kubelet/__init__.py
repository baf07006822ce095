"""The kubelet's interfaces: the device plugin API, registration, and the kubelet's records.

`plugin_server` answers the calls for one pool on a socket from `plugin_sockets`. `registration`
keeps the pool registered. `records` finds the holders of ids in the kubelet's files and in the
answers of `pod_resources`.
"""
