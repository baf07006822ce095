"""The CNI plugin `rdma`: for definitions that chain it behind `sriov`, as with rdma-cni.

It completes the attachment of `sriov`, whose DEL restores the RDMA devices too. The option
`"rdmaIsolation": true` of `sriov` does the same without a chain.
"""
