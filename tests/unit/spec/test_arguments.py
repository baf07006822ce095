"""CNI_ARGS, by the rows L1 to L10 of the conformance table."""

from hypothesis import given
from hypothesis import strategies as st

from base.pod import Pod
from cni.spec.errors import CNIError, Code
from cni.spec.request import parse_arguments

CRI = (
    "K8S_POD_NAMESPACE=default",
    "K8S_POD_NAME=p-0",
    "K8S_POD_INFRA_CONTAINER_ID=0123abcd",
    "K8S_POD_UID=8a5f0f3c-7d3b-4a3e-9a55-2a4c1c7f3a10",
)


@given(st.permutations([*CRI, "IgnoreUnknown=1"]))
def test_container_runtimes_arguments_name_the_pod_in_any_order(pairs: list[str]) -> None:
    expected = Pod("default", "p-0", "8a5f0f3c-7d3b-4a3e-9a55-2a4c1c7f3a10")
    assert parse_arguments(";".join(pairs)).pod == expected


@given(st.text(max_size=40))
def test_any_text_is_read_or_is_an_environment_error(text: str) -> None:
    try:
        parse_arguments(text)
    except CNIError as error:
        assert error.code == Code.INVALID_ENVIRONMENT
