"""The RDMA device plugin: finds HCAs, offers them to the kubelet in pools, records allocations.

- `service` runs `plugin`, which connects the parts.
- `inventory` reads the HCAs, `health` judges their ports, `pools` assigns HCAs to pools.
- `availability` decides which device ids may be allocated.
- `pool_service` answers the kubelet's calls for one pool; the protocol is in `kubelet`.
- `allocate` makes the answer for a container; `ledger` records the allocation in the `checkpoint`.
- `reconcile` compares the ledger with the kubelet's records; `current` compares device numbers.
- The CNI plugins use `pod_devices` and `devices_for_pods` to find the HCAs of pods.
"""

import os

# After a fork, gRPC restarts its threads in the child. A thread that runs before exec aborts the
# child. The agent forks for every delegate, and no child calls gRPC. gRPC reads the variable once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
