"""The CNI plugin `sriov`: a virtual function of an SR-IOV HCA, moved into the pod.

`plugin` has the steps of each verb. `options` and `option_values` read the network configuration.
`candidates` lists devices, `plan` checks a device, and `claim` records it for the attachment.
`device_record` is that record. `vf_policy` applies the policy. `vf_settings` sets and restores the
PF's settings for a VF. `interface` moves the device into the pod, and `rdma_devices` its RDMA
devices. `guids` gives a VF new GUIDs. `vf_release` restores the device from its record. `sriov_cni`
and `unrecorded` make missing records.
"""
