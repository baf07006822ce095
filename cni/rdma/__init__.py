"""The CNI plugin `rdma`, for definitions that chain it behind `sriov`, as with rdma-cni.

Its ADD moves the RDMA devices of an attachment of `sriov`. The DEL of `sriov` restores them. The
option `"rdmaIsolation": true` of `sriov` does the same without a chain.
"""
