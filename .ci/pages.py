"""Hooks of mkdocs: the README is the first page, and links to files that are no pages become their names."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"

    def link(match: re.Match[str]) -> str:
        text, target, heading = match.group(1), (folder / match.group(2)).resolve(), match.group(3) or ""
        if target == ROOT / "README.md":
            return f"[{text}](index.md{heading})"
        if target.is_relative_to(ROOT / "docs"):
            return f"[{text}]({target.relative_to(ROOT / 'docs')}{heading})"
        return f"{text} (`{target.relative_to(ROOT)}`)" if text != str(target.relative_to(ROOT)) else f"`{text}`"

    return _LINK.sub(link, markdown)
