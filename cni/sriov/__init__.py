"""The CNI plugin `sriov`: a virtual function of an SR-IOV HCA, moved into the pod.

`plugin` has the steps of each verb, in order. `options` and `option_values` read the network
configuration. `claim` gets a device for an attachment: `candidates` lists the devices, `plan`
decides whether a device fits, `device_record` is the journal's record of the device. `vf_settings`
sets and restores the PF's settings for its VF. `vf_policy` applies the policy to the options and
the device. `interface` moves the device into the pod and compares the device there. `guids` rebinds
a VF for a new GUID. `rdma_devices` moves RDMA devices, keeps uverbs numbers and binds drivers.
`vf_release` restores the device from its record. `sriov_cni` makes records for attachments of
sriov-cni and ib-sriov-cni, `unrecorded` for a device whose journal file is lost.
"""
