"""Write deploy/kustomize's generated files from the Helm chart: the chart is the only source.

`python -m tools.manifests` writes them; `generated` gives their content, for a test to compare.
"""

import re
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CHART = CHECKOUT / "deploy/chart"
KUSTOMIZE = CHECKOUT / "deploy/kustomize"
NAMESPACE = "podfabric"
IMAGE = ("--set-json", 'image.repository="podfabric"')  # users of kustomize set their own
KUBERNETES = "1.36.3"  # Helm asks no cluster here

# Labels that only Helm needs; they would be wrong on objects that Helm does not own.
_HELMS = re.compile(
    r"^ *(# Source: .*|annotations:\n *helm\.sh/resource-policy: .*|helm\.sh/chart: .*"
    r"|app\.kubernetes\.io/(managed-by|instance): .*)\n",
    re.MULTILINE,
)
_ABOUT = "# Made from deploy/chart by `make manifests`: change the chart.\n"


def template(*arguments: str) -> str:
    """The objects of the chart without hooks, as `helm template` prints them."""
    return helm("template", NAMESPACE, str(CHART), "--namespace", NAMESPACE, *IMAGE, *arguments)


def helm(*arguments: str) -> str:
    """The output of helm. Raises CalledProcessError with helm's message in `stderr` if helm
    fails."""
    command = [str(CHECKOUT / "tools/go_tool.sh"), "helm", *arguments]
    if arguments[0] in ("template", "lint"):
        command += ["--kube-version", KUBERNETES]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def generated() -> dict[Path, str]:
    """The content of each generated file."""
    scc = template("-f", str(CHART / "values-openshift.yaml"), "-s", "templates/openshift.yaml")
    return {
        KUSTOMIZE / "base/podfabric.yaml": _plain(template("--no-hooks")),
        KUSTOMIZE / "openshift/scc.yaml": _plain(scc.split("\n---\n")[0] + "\n"),
    }


def _plain(text: str) -> str:
    return _ABOUT + _HELMS.sub("", text)


def main() -> None:
    """Write the files."""
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(CHECKOUT))


if __name__ == "__main__":
    main()
