"""What the plugins `ipoib` and `sriov` share: the life of an attachment.

`journal` has a file per attachment, on disk before the first change to the kernel. `lifecycle` is
the part of a plugin that is the same in both: everything that ends an attachment. `orphans`
ends those that no sandbox needs, by `sandbox`. `matching` decides which devices a pod may have, and
`pod_choices` remembers which HCA an attachment took. `results` makes and compares results.
"""
