"""Hooks of `make docs`: every page keeps its place in the repository, so that links work here as they do there."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify
from pymdownx.superfences import fence_code_format


ROOT = Path(__file__).parent.parent
FOLDERS = (".", "app", "benchmarks/**", "docs/**", "recipes/**")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def on_config(config):
    """Anchors as on GitHub, diagrams, and in the menu every page of numbers."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    mermaid = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [mermaid]}
    pages = sorted(path.relative_to(ROOT) for path in ROOT.glob("benchmarks/results/**/*.md"))
    results = next(section["Results"] for section in config.nav if "Results" in section)
    numbers = next(section for section in results if "All numbers" in section)
    numbers["All numbers"] = [{_title(page): str(page)} for page in pages]


def _title(page):
    name = page.parent.name if page.stem in ("tables", "results") else page.stem
    return name.replace("_", " ").capitalize()


def on_files(files, config):
    """All pages, and the files that they link to, in place of those of one folder."""
    pages = {page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md")}
    linked = {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text("utf-8"))}
    found = {path.relative_to(ROOT) for path in pages | linked if path.is_file()}
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *(File.generated(config, str(path), abs_src_path=ROOT / path) for path in sorted(found))])


def on_page_content(html, page, **kwargs):
    """Types and references of docstrings are in Hugging Face's notation, which is shown without its marks."""
    if page.file.src_uri != "docs/api.md":
        return html
    html = re.sub(r"\[(<code>)~?([^<]+</code>)\]", r"\1\2", html)
    return re.sub(r"<code>[^<]*`[^<]*</code>", lambda code: re.sub(r"\[`~?|`\]|`|\*", "", code[0]), html)
