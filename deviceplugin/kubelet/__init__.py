"""The kubelet: the device plugin API on sockets, registration, and the kubelet's records."""
