"""P_Keys in configurations."""

import re

from base.types import PKey
from cni.spec.errors import invalid_config


def read(given: int | str | None) -> PKey | None:
    """A P_Key as it is written, with or without the bit of a full member; None if it is not given.

    CNIError 7 for what is none, and for 0 and 0x8000, which the kernel refuses.
    """
    if given is None or given == "":
        return None
    text = str(given)
    if not re.fullmatch(r"0[xX][0-9a-fA-F]{1,4}|[0-9]{1,5}", text):
        raise invalid_config(
            f'"pkey": "{text}" is no P_Key: write it as a string such as "0x8001", or a number'
        )
    pkey = int(text, 16) if text[:2] in ("0x", "0X") else int(text)
    if pkey & 0x7FFF == 0 or pkey > 0xFFFF:
        raise invalid_config(
            f'"pkey": {text} is out of range: 0x0001 to 0x7fff, or 0x8001 to 0xffff with the '
            "bit of a full member"
        )
    return PKey(pkey)
