"""Find wording that readers must read twice, in docstrings, comments, texts and pages.

    python -m tools.plain_english [PATH ...]

Prints `file:line: words: advice` for each place and exits with 1 if there is one. Checks the
tracked files below each PATH (by default the whole repository). Skips text in backticks and code.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_LINE = 120  # of a page, in characters
LONGEST_CELL = 25  # of a table, in words

# Wording to avoid in a sentence, and what to write instead.
_ADVICE = {
    r"\bNone (?:if|of|where|when|unless|at)\b": "name the empty value, or write `None`",
    r"(?:^|[.;:] )(?:What|Who|Whose) [^?.]*(?:\.|$)": "begin with a noun, not with a clause",
    r"\b(?:is|are) (?:told|said|asked)\b": "say who logs, reports, records or requests it",
    r"\b(?:goes|go|going|went) by\b": "uses",
    r"\b(?:owes?|heeds?|buries|bury)\b": "use a verb for programs",
    r"\bbut for\b": "except for",
    r"\bfor want of\b": "without",
    r"\ball the same\b": "anyway, still",
    r"\bin vain\b": "failed",
    r"\bso many\b": "give the number or its name",
    r"\blately\b": "recently",
    r"\b(?:as it is|of one piece|by turns|without a word)\b": "say it directly",
    r"\blets? go of\b": "releases",
    r"\bin force\b": "active, current",
    r"\banew\b": "again",
    r"\bnobody else\b|\bno one else\b": "name who",
    r"\bthe former\b": "previous, or name the thing",
    r"\bof (?:before|long ago)\b": "earlier",
    r"\bwhatever\b": "name what it may be",
    r"\bis no [a-z]+": "is not a, does not exist",
    r"\b(?:others|another's|others')\b": "name the other things",
}
_PATTERNS = [(re.compile(pattern), advice) for pattern, advice in _ADVICE.items()]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical"}


def _files(places: list[str]) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *places]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / line for line in listed.stdout.splitlines()]
    return [file for file in files if file.exists() and "_pb2" not in file.name]


def _text(node: ast.expr) -> str:
    """The words of a text; each value within an f-string counts as `x`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (_text(part) if isinstance(part, ast.Constant) else "x" for part in node.values)
        return "".join(parts)
    return ""


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The texts of raised errors and of log lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = node.exc.args
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _LOG_CALLS
        ):
            texts = node.args
        else:
            continue
        yield from ((text.lineno, _text(text)) for text in texts)


def _python(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, comments, and messages of a module: their first line and text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (doc := ast.get_docstring(node)):
            yield node.body[0].lineno, doc
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    yield from _messages(tree)


def _c_comments(source: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"/\*.*?\*/|//[^\n]*", source, re.DOTALL):
        yield (
            source.count("\n", 0, match.start()) + 1,
            re.sub(r"\n\s*\*?", "\n", match[0].strip("/* ")),
        )


def _page(source: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and table cells of a page."""
    plain = re.sub(
        r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), source, flags=re.S | re.M
    )
    line = 1
    for block in re.split(r"(\n(?:\s*\n)+|\n(?=\s*(?:[-*|]|\d+\.) ))", plain):
        if block.strip() and not block.lstrip().startswith("#"):
            yield line, re.sub(r"^[#>*|\s-]+", "", block)
        line += block.count("\n")


def _shape_of_page(source: str) -> Iterator[tuple[int, str, str]]:
    """Lines and table cells of a page that are too long."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if code:
            continue
        if len(line) > LONGEST_LINE and "](" not in line and not line.startswith("|"):
            yield number, f"{len(line)} characters", f"at most {LONGEST_LINE} in a line"
        for cell in line.split("|") if line.startswith("|") else ():
            if len(cell.split()) > LONGEST_CELL:
                yield (
                    number,
                    f"{len(cell.split())} words",
                    f"at most {LONGEST_CELL} in a table cell",
                )


def findings(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, words and advice for each wording of `file` that readers must read twice."""
    readers = {".py": _python, ".c": _c_comments, ".h": _c_comments, ".md": _page}
    reader = readers.get(file.suffix)
    if reader is None or file == Path(__file__):
        return
    source = file.read_text()
    for line, text in reader(source):
        words = re.sub(r"`[^`]*`", "`x`", re.sub(r"\s+", " ", text))
        for pattern, advice in _PATTERNS:
            for match in pattern.finditer(words):
                yield line, match[0], advice
    if file.suffix == ".md":
        yield from _shape_of_page(source)


def main() -> int:
    """Print all findings; returns the exit status."""
    found = 0
    for file in _files(sys.argv[1:] or ["."]):
        for line, words, advice in findings(file):
            print(f"{file.relative_to(ROOT)}:{line}: {words[:60]!r}: {advice}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
