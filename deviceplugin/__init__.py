"""The RDMA device plugin: finds HCAs, offers them to the kubelet in pools, records allocations.

- `service` starts `plugin`, which connects the parts.
- `inventory` reads the HCAs, `health` checks their ports, `pools` assigns HCAs to pools.
- `availability` decides which device ids may be allocated.
- `pool_service` answers the kubelet's calls for one pool. `kubelet` has the protocol.
- `allocate` makes the answer for a container. `ledger` records allocations in the `checkpoint`.
- `reconcile` compares the ledger with the kubelet's records. `current` compares device numbers.
- The CNI plugins find the HCAs of pods with `pod_devices` and `devices_for_pods`.
"""

import os

# After a fork, gRPC would start threads in the child. These may abort the child before its exec.
# No child of the agent uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
