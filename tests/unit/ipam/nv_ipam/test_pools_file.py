"""The file of what a node saw of nv-ipam's pools: a damaged one is a clear error."""

from pathlib import Path

import msgspec
import pytest

from cni.spec.errors import CNIError, Code
from ipam.nv_ipam.translate import NodePools, pools_file, read_pools


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"pools": {"\xff": 1}}'])
def test_a_damaged_file_is_an_error_until_it_is_written_again(
    tmp_path: Path, damage: bytes
) -> None:
    path = Path(pools_file(tmp_path))
    assert read_pools(tmp_path) is None
    path.write_bytes(damage)
    with pytest.raises(CNIError) as raised:
        read_pools(tmp_path)
    assert raised.value.code == Code.STORE_DAMAGED
    assert str(path) in raised.value.message
    path.write_bytes(msgspec.json.encode(NodePools()))
    assert read_pools(tmp_path) == NodePools()
