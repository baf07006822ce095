"""A hook of mkdocs (mkdocs.yml): shows links to files of the repository as their paths.

A page in docs/ may link to an example or to code, which the site does not have.
"""

import os
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]*)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:  # noqa: ANN401 - mkdocs' objects
    """The page with the paths of files outside of docs/ in place of links to them."""
    docs = Path(config.docs_dir)
    here = docs / Path(page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(here / link[2]))
        if path.is_relative_to(docs) or not path.is_relative_to(docs.parent):
            return link[0]
        name = f"`{path.relative_to(docs.parent)}`"
        return name if link[1].strip("`") in name else f"{link[1]} ({name})"

    return _LINK.sub(shown, markdown)
