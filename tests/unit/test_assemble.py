"""podfabric does not need the parts of the API server's client that the image leaves out."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import assemble

CHECKOUT = Path(__file__).resolve().parents[2]
MOST_BYTES = 3_000_000
IMPORTS = """
import sys
from kube.transport import KubernetesApi
from kubernetes.client import ApiClient
print(sys.modules["kubernetes"].__file__)
"""


@pytest.mark.slow
def test_what_is_left_of_the_client_is_small_and_works(tmp_path: Path) -> None:
    site = assemble.site_packages(Path(sys.prefix))
    copied = tmp_path / "site"
    copied.mkdir()
    for each in site.iterdir():
        if each.is_dir():
            shutil.copytree(each, copied / each.name, copy_function=os.symlink)
        elif each.suffix != ".pth":
            (copied / each.name).symlink_to(each)
    assemble.leave_out_of_client(copied)
    left = [path for path in (copied / "kubernetes").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < MOST_BYTES
    assert not (copied / "aiohttp").exists()
    assert (site / "aiohttp").exists()
    done = subprocess.run(
        [sys.executable, "-S", "-c", IMPORTS],
        env={**os.environ, "PYTHONPATH": f"{copied}:{CHECKOUT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(copied / "kubernetes/__init__.py")


def test_what_only_asyncio_needs_is_needed_by_nothing_else() -> None:
    lock = (CHECKOUT / "requirements.lock").read_text()
    runtime = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    left = runtime - set(assemble.ONLY_FOR_ASYNCIO) - {"kubernetes"}
    assert set(assemble.ONLY_FOR_ASYNCIO) <= runtime
    for name in left:
        for line in importlib.metadata.requires(name) or ():
            needed = re.split(r"[<>=!~;\[ (]", line, maxsplit=1)[0].lower().replace("_", "-")
            assert "extra ==" in line or needed not in assemble.ONLY_FOR_ASYNCIO, (name, line)
