"""The RDMA device plugin: pools of HCAs for the kubelet, and a checkpoint of who got which.

`service` runs it, `manager` is its life: what `inventory` sees and `health` makes of it becomes
the offers (`pools`, `fitness`, `offer`), which `kubelet` serves; what is handed out (`grants`) the
`ledger` writes into the `checkpoint`. From there `match` tells the CNI plugins which HCAs a pod
has.
"""
