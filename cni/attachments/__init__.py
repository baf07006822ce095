"""The life of an attachment, shared by the plugins `ipoib` and `sriov`.

`journal` keeps a file for each attachment, and writes the file before the first change to the
kernel. `lifecycle` ends attachments for both plugins. `orphans` ends attachments whose `sandbox` is
gone. `matching` decides which devices a pod may have. `pod_choices` stores the HCA that an
attachment took. `results` makes and compares results.
"""
