"""CNI_ARGS, by the rows L1 to L10 of the conformance table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.pod import Pod
from cni.spec.errors import CNIError, Code
from cni.spec.request import Arguments, parse_arguments

CRI = (
    "K8S_POD_NAMESPACE=default",
    "K8S_POD_NAME=p-0",
    "K8S_POD_INFRA_CONTAINER_ID=0123abcd",
    "K8S_POD_UID=8a5f0f3c-7d3b-4a3e-9a55-2a4c1c7f3a10",
)


def test_no_arguments_are_empty() -> None:
    assert parse_arguments("") == Arguments()


def test_unknown_key_is_an_error_that_quotes_the_pair() -> None:
    with pytest.raises(CNIError) as caught:
        parse_arguments("FOO=BAR")
    assert caught.value.code == Code.INVALID_ENVIRONMENT
    assert caught.value.message == 'ARGS: unknown args ["FOO=BAR"]'


def test_every_unknown_pair_is_listed() -> None:
    with pytest.raises(CNIError, match=r'unknown args \["A=1" "B=2"\]'):
        parse_arguments("A=1;K8S_POD_NAME=p;B=2")


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "True", "tRuE"])
@pytest.mark.parametrize("text", ["IgnoreUnknown={};FOO=BAR", "FOO=BAR;IgnoreUnknown={}"])
def test_unknown_keys_may_be_ignored_wherever_that_is_said(text: str, value: str) -> None:
    assert parse_arguments(text.format(value)) == Arguments()


@pytest.mark.parametrize("value", ["0", "false", "FALSE", "False"])
def test_false_ignores_nothing(value: str) -> None:
    with pytest.raises(CNIError, match="unknown args"):
        parse_arguments(f"IgnoreUnknown={value};FOO=BAR")


@pytest.mark.parametrize("value", ["yes", "", "t", "2", " 1"])
def test_any_other_value_is_not_a_boolean(value: str) -> None:
    with pytest.raises(CNIError) as caught:
        parse_arguments(f"IgnoreUnknown={value};FOO=BAR")
    assert caught.value.message == f"ARGS: boolean unmarshal error: invalid input {value}"


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("IgnoreUnknown=1;", ""),
        (";IgnoreUnknown=1", ""),
        ("A=B=C;IgnoreUnknown=1", "A=B=C"),
        ("A;IgnoreUnknown=1", "A"),
    ],
)
def test_broken_pair_is_an_error_even_if_unknown_keys_are_ignored(text: str, pair: str) -> None:
    with pytest.raises(CNIError) as caught:
        parse_arguments(text)
    assert caught.value.message == f'ARGS: invalid pair "{pair}"'


def test_keys_are_case_sensitive() -> None:
    read = parse_arguments("IgnoreUnknown=1;ip=10.1.2.9;IP=10.1.2.8")
    assert read == Arguments(ip="10.1.2.8")


def test_values_are_not_interpreted() -> None:
    read = parse_arguments("IP=10.1.2.9/24,fd00::9/64;GATEWAY=x;MAC=y")
    assert read == Arguments(ip="10.1.2.9/24,fd00::9/64", gateway="x", mac="y")


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
