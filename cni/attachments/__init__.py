"""The life of an attachment, shared by the plugins `ipoib` and `sriov`.

`journal` has a file per attachment, on disk before the first change to the kernel. `lifecycle` is
the common part of both plugins: it ends attachments. `orphans` ends those whose `sandbox` is gone.
`matching` decides which devices a pod may have, and `pod_choices` stores the HCA that an attachment
took. `results` makes and compares results.
"""
