"""The kubelet's side: the device plugin API on sockets, registration, what it has on record."""
