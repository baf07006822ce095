"""The CNI plugin `sriov`: a virtual function of an SR-IOV HCA, moved into the pod.

`plugin` is what happens to a pod, in order. `options` and `option_values` read the network
configuration. `claim` gets a device for an attachment: `candidates` lists the devices, `plan`
decides whether one will do, `device_record` is what the journal keeps of it. `vf_settings` are
those that the PF has for its VF. `interface` moves the device into the pod, with `guids` and
`rdma_devices`, which also keeps their uverbs numbers and binds drivers. `vf_release` restores the
device from the record. `sriov_cni` makes records of what sriov-cni and ib-sriov-cni attached,
`unrecorded` of a device whose journal file is lost. `vf_check` compares.
"""
