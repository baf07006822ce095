"""Moving over from whereabouts with its pods running: the controller alone knows its objects.

They are never converted: they shrink as pods of whereabouts end (docs/whereabouts.md).
"""
