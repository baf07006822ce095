"""The modules of the kubelet's APIs are what `make protos` makes of their .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
API = Path("deviceplugin/api")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the Makefile's command makes, in another directory."""
    directory = tmp_path_factory.mktemp("protos")
    sources = [str(path.relative_to(ROOT)) for path in sorted((ROOT / API).glob("*.proto"))]
    outputs = [f"--{kind}_out={directory}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *sources],
        cwd=ROOT,
        check=True,
    )
    return directory / API


@pytest.mark.parametrize("proto", ["v1beta1", "podresources"])
@pytest.mark.parametrize("kind", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_a_generated_module_is_as_it_would_be_made(made: Path, proto: str, kind: str) -> None:
    name = f"{proto}{kind}"
    assert (ROOT / API / name).read_text() == (made / name).read_text()


def test_no_proto_and_no_module_is_without_the_other(made: Path) -> None:
    assert {path.name for path in (ROOT / API).glob("*_pb2*")} == {
        path.name for path in made.iterdir()
    }
