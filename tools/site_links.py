# SPDX-License-Identifier: Apache-2.0
"""Hook of MkDocs (`mkdocs.yml`): on the site, a link that leaves `docs/` becomes the name of its file.

Readers of the repository can follow such a link; the site does not contain its target.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with links out of `docs/` replaced by their text and the file's path."""
    return without_outside_links(markdown, page.file.src_uri)


def without_outside_links(markdown: str, source: str) -> str:
    """Replace each link that leaves `docs/` by its text and, in parentheses, the path in the repository.

    `source` is the page's path below `docs/`, with slashes.
    """

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), match[2]))
        if path.startswith("docs/"):
            return match[0]
        text = match[1]
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
