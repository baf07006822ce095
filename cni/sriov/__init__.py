"""The CNI plugin `sriov`: a virtual function of an SR-IOV HCA, moved into the pod.

`plugin` has the steps of each verb. `plan` checks a device, and `claim` records the device for the
attachment. `vf_settings` sets the PF's settings for a VF. `interface` moves the device into the
pod. `vf_release` restores the device from its record.
"""
