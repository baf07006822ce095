"""The life of an attachment, shared by the plugins `ipoib` and `sriov`.

`journal` keeps a file for each attachment. `lifecycle` ends attachments. `orphans` ends attachments
without a living `sandbox`. `matching` decides which devices a pod may have. `pod_choices` stores
the HCA that an attachment took. `results` makes and compares results.
"""
