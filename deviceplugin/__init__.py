"""The RDMA device plugin: pools of HCAs for the kubelet, and a checkpoint of who got which.

`service` runs it, `manager` is its life: what `inventory` sees and `health` makes of it becomes
the offers (`pools`, `fitness`, `offer`), which `kubelet` serves; what is handed out (`grants`) the
`ledger` writes into the `checkpoint`; `comparison` holds it against the kubelet's own records.
From there `match` tells the CNI plugins which HCAs a pod has.
"""

import os

# gRPC's fork handlers start its threads anew in the child, which abort it if they run before exec:
# the agent forks for every delegate, and none of its children calls gRPC. Read at its first use.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
