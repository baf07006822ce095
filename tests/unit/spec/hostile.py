"""Configurations of nearly 1 MiB that cost a careless decoder the most."""

from cni.spec import limits

_SIZE = limits.MAX_BYTES - 100
HOSTILE = {
    "numbers": b'{"a":[' + b"1," * (_SIZE // 2) + b"1]}",
    "brackets": b"[" * _SIZE,
    "empty lists": b"[" + b"[]," * (_SIZE // 3) + b"[]]",
    "empty strings": b"[" + b'"",' * (_SIZE // 3) + b'""]',
    "quotes": b'"' * _SIZE,
    "backslashes": b'"' + b"\\" * _SIZE + b'"',
    "spaces": b"{" + b" " * _SIZE + b"}",
    "digits": b"[" + b"1" * _SIZE + b"]",
    "one string": b'["' + b"x" * _SIZE + b'"]',
    "long strings": b"[" + b'"%s",' % (b"[" * 16_000) * 60 + b"1]",
    "many strings": b"[" + b'"%s",' % (b"," * 100) * 9_900 + b"1]",
    "many objects": b"[" + b'{"k":1},' * 3_300 + b"1]",
}
