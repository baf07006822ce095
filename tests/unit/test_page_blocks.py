"""Every command line, definition, object and configuration in the pages is one that works."""

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import settings
from cli.arguments import Parser
from cli.commands import COMMANDS
from cli.policy import WrittenDefinition, verdicts
from deviceplugin.pools import formats
from policy.rules import Policy
from tests.runtime import CHECKOUT

PAGES = sorted([CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md")])
JOBS = sorted((CHECKOUT / "netattach-examples/jobs").glob("*.yaml"))
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`(podfabric [^`]+)`")
OURS = ("ipoib", "sriov", "ib-sriov", "rdma", "podfabric-macvlan", "podfabric-ipvlan")
# Of config.yaml, and of the files of other device plugins.
CONFIGURATION = {"agent", "policy", "ipam", "pools", "gpus", "gpuLimits"}
OTHERS = {"configList", "resourceList"}


def blocks(*languages: str) -> list[Any]:
    """The blocks of all pages in these languages, as parameters of a test."""
    return [
        pytest.param(text, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (_, language, text) in enumerate(BLOCK.findall(page.read_text()))
        if language in languages
    ]


def command_lines() -> Iterator[tuple[str, str]]:
    """The lines of pages that run podfabric: the page's name, and the words after `podfabric`."""
    for page in PAGES:
        text = page.read_text()
        found = SPAN.findall(text)
        for _, language, block in BLOCK.findall(text):
            if not language:
                found += re.findall(r"(?:^|-- |# |\$ |/)(podfabric .+)", block, re.MULTILINE)
        for line in found:
            words = re.split(r"\s+#|\s[|;>&]", line)[0].removeprefix("podfabric").strip()
            name = words.partition(" ")[0]
            if name in COMMANDS and name != "device-plugin":  # which has Go's flags
                yield page.stem, words


@cache
def parser(name: str) -> argparse.ArgumentParser:
    made = Parser(prog=name)
    command = COMMANDS[name]
    getattr(importlib.import_module(command.module), command.add_arguments)(made)
    return made


@cache
def schema(name: str) -> Mapping[str, Any]:
    """The schema of a CRD's objects, or of the chart's values for ""."""
    if not name:
        text = (CHECKOUT / "deploy/chart/values.schema.json").read_text()
        values: dict[str, Any] = json.loads(text)
        return values
    manifests = yaml.safe_load_all((CHECKOUT / "deploy/kustomize/base/podfabric.yaml").read_text())
    (version,) = (
        version
        for each in manifests
        if each and each["kind"] == "CustomResourceDefinition"
        if each["spec"]["names"]["kind"] == name
        for version in each["spec"]["versions"]
    )
    served: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return served


def unknown(value: object, known: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The keys of `value` that the schema lacks."""
    if isinstance(value, dict) and "properties" in known:
        for key, part in value.items():
            if key in known["properties"]:
                yield from unknown(part, known["properties"][key], f"{path}.{key}")
            elif path or key not in ("apiVersion", "kind", "metadata"):
                yield f"{path}.{key}"
    elif isinstance(value, list):
        for part in value:
            yield from unknown(part, known.get("items", {}), path)


def require_works(config: str) -> None:
    """Check that podfabric's plugins accept a network configuration."""
    plugins = json.loads(config)
    listed = plugins.get("plugins", [plugins])
    assert any(each["type"] in OURS or "ipam" in each for each in listed), config
    for verdict in verdicts([WrittenDefinition("default", "page", config)], Policy(), {}):
        if verdict.plugin in OURS:
            assert verdict.allowed, verdict.said


@pytest.mark.parametrize(("page", "words"), sorted(set(command_lines())))
def test_a_command_line_is_one_that_the_command_accepts(
    page: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = re.sub(r"[\[\]]|\.\.\.$", "", words).replace("SECONDS", "60")
    name, *given = shlex.split(plain)
    try:
        parser(name).parse_args(given)
    except SystemExit as ended:
        error = capsys.readouterr().err
        # --help, or a sentence that only names the command
        assert ended.code == 0 or "arguments are required" in error, error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_targets_values_and_files_of_command_lines_exist(page: Path) -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    shown = "\n".join(text for _, language, text in BLOCK.findall(page.read_text()) if not language)
    for target in re.findall(r"^make ([a-z-]+)", shown, re.MULTILINE):
        assert f"\n{target}:" in makefile
    for key in re.findall(r"--set(?:-string|-json)? ([\w.]+)=", shown):
        document: object = ""
        for part in reversed(key.split(".")):
            document = {part: document}
        assert list(unknown(document, schema(""))) == []
    for name in re.findall(
        r"(?:^|\s)((?:deploy/chart|deploy/kustomize|netattach-examples|agent)/[\w./-]*\w)", shown
    ):
        assert (CHECKOUT / name).exists(), name


@pytest.mark.parametrize("text", blocks("json"))
def test_a_network_configuration_is_one_that_the_plugins_accept(text: str) -> None:
    document = json.loads(text)
    if "type" in document and "cniVersion" not in document:  # the section `ipam` alone
        document = {
            "cniVersion": "1.0.0",
            "name": "page",
            "type": "ipoib",
            "master": "auto",
            "ipam": document,
        }
    if "cniVersion" in document:
        require_works(json.dumps(document))


@pytest.mark.parametrize("text", blocks("yaml"))
def test_an_object_or_a_configuration_is_one_that_is_accepted(text: str, tmp_path: Path) -> None:
    for document in yaml.safe_load_all(text):
        kind = document.get("kind", "")
        if kind == "NetworkAttachmentDefinition":
            require_works(document["spec"]["config"])
        elif "podfabric.io/" in document.get("apiVersion", ""):
            assert list(unknown(document, schema(kind))) == []
        elif CONFIGURATION.issuperset(document) or OTHERS.issuperset(document):
            require_configuration(document, tmp_path / "config.yaml")
        elif set(document) <= set(schema("")["properties"]):
            assert list(unknown(document, schema(""))) == []
            if "config" in document:
                require_configuration(document["config"], tmp_path / "config.yaml")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: str(path.stem))
def test_a_definition_of_a_job_is_accepted(path: Path) -> None:
    kinds = {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}
    require_works(kinds["NetworkAttachmentDefinition"]["spec"]["config"])


def require_configuration(document: object, path: Path) -> None:
    """Check that the agent and the device plugin accept this config.yaml."""
    path.write_text(yaml.safe_dump(document))
    formats.load(path)
    assert not settings.load(path).mistakes


def test_a_mistake_in_a_page_would_be_found(tmp_path: Path) -> None:
    assert list(unknown({"spec": {"rnage": ""}}, schema("AddressPool"))) == [".spec.rnage"]
    with pytest.raises(AssertionError, match="mastre"):
        require_works('{"type": "ipoib", "cniVersion": "1.0.0", "name": "n", "mastre": "ib0"}')
    with pytest.raises(SystemExit):
        parser("devices").parse_args(["--gpsu"])
