"""Show the files outside docs/ that its pages link to on the documentation site: a hook of mkdocs.

The pages keep links that are right in the repository, such as ``../benchmarks/LOG.md``. The site has such a
file, and those that it links to, under ``files/``: Markdown as a page, other text as a page with its source.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure import StructureItem
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDER = "files"
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the linked files."""
    queue = [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by]
    for path in queue:
        for target in _linked(path):
            uri = _uri(target)
            if files.get_file_from_path(uri) is None and (ROOT / target).exists():
                files.append(_file(target, uri, config))
                queue.append(target)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links that are relative to a file of the repository lead to its page on the site."""
    uri = page.file.src_uri
    path = uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"
    if not (ROOT / path).is_file():
        return markdown

    def link(found: re.Match[str]) -> str:
        target = _uri(_resolve(path, found[1]))
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") + (found[2] or "")

    return _LINK.sub(link, markdown)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Let entries of the navigation lead to headings: ``page.md#heading``."""
    for item in _walk(nav.items):
        if isinstance(item, Link):
            path, _, anchor = item.url.partition("#")
            if (file := files.get_file_from_path(path)) is None:
                raise PluginError(f"the navigation names {item.url}, which is not there")
            item.url = f"{file.url}#{anchor}"


def _walk(items: Iterable[StructureItem]) -> Iterator[StructureItem]:
    for item in items:
        yield item
        if isinstance(item, Section):
            yield from _walk(item.children)


def _resolve(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _linked(path: str) -> list[str]:
    """Return the files of the repository that a page links to."""
    if not path.endswith(".md"):
        return []
    return [_resolve(path, link) for link, _ in _LINK.findall((ROOT / path).read_text(encoding="utf-8"))]


def _uri(path: str) -> str:
    """Return the path on the site of a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    suffix = "" if path.endswith((".md", ".png")) else "/index.md" if (ROOT / path).is_dir() else ".md"
    return f"{FOLDER}/{path}{suffix}"


def _file(path: str, uri: str, config: MkDocsConfig) -> File:
    source = ROOT / path
    if source.suffix in (".md", ".png"):
        return File.generated(config, uri, abs_src_path=str(source))
    parts = ["---\nsearch: { exclude: true }\n---", f"# {path}"]
    if source.is_dir():
        texts = [it for it in sorted(source.iterdir()) if it.suffix in _LANGUAGES]
        parts += [f"## {it.name}\n\n{_block(it)}" for it in texts]
    else:
        parts.append(_block(source))
    return File.generated(config, uri, content="\n\n".join(parts))


def _block(source: Path) -> str:
    text = source.read_text(encoding="utf-8").rstrip()
    return f"````{_LANGUAGES.get(source.suffix, 'text')}\n{text}\n````"
