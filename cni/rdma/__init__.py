"""The CNI plugin `rdma`, for definitions that have `rdma` behind `sriov`, as with rdma-cni.

ADD moves the RDMA devices of an attachment of `sriov`. The DEL of `sriov` restores the devices. The
option `"rdmaIsolation": true` of `sriov` does the same without `rdma`.
"""
