"""The CNI plugin `sriov`: a virtual function of an SR-IOV HCA, moved into the pod.

`plugin` has the steps of each verb, in order. `options` and `option_values` read the network
configuration. `claim` gets a device for an attachment: `candidates` lists the devices, `plan`
decides whether one will do, `device_record` is the journal's record of it. `vf_settings` sets and
restores the PF's settings for its VF, and `vf_policy` asks the policy for them. `interface` moves
the device into the pod and compares it there, with `guids` and `rdma_devices`, which also keeps
uverbs numbers and binds drivers. `vf_release` restores the device from the record. `sriov_cni`
makes records of attachments of sriov-cni and ib-sriov-cni, `unrecorded` of a device whose journal
file is lost.
"""
