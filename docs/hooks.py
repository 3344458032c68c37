"""Hooks of the site's build (`make docs`): pages that are made from the code and from files outside `docs/`.

The table of recipe keys comes from the recipe's dataclasses; the log, the list of results, the changelog and the guide
for contributors are the files of the repository themselves; the notebook's cells are a page. So no page is a copy that
can become stale. Links are written as the repository needs them; here a link to a file outside `docs/` becomes a link
to the page made from it, or to a copy of the file that goes into the site.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

from resolute.train.recipe.keys import table

ROOT = Path(__file__).resolve().parents[1]
# page of the site: file of the repository that it shows
INCLUDED = {
    "log.md": "benchmarks/results/LOG.md",
    "results.md": "benchmarks/results/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
KEYS, NOTEBOOK = "recipe_keys.md", "notebook.md"
# a link of Markdown: its text stays, its target is looked at
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages made from files outside `docs/`, and the files of the repository that pages link to."""
    for page, path in INCLUDED.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, NOTEBOOK, content=notebook(ROOT / "docs" / "notebook.ipynb")))
    linked = {
        target
        for file in files.documentation_pages()
        for link in LINK.findall(file.content_string)
        if (target := site_target(file.src_uri, link[1])) and target.startswith("files/")
    }
    for target in sorted(linked):
        files.append(File.generated(config, target, abs_src_path=str(ROOT / target.removeprefix("files/"))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page to files outside `docs/`; append the table to the page of the keys."""
    source = page.file.src_uri
    if source == KEYS:
        markdown += "\n\n" + table().replace("### ", "## ")
    return LINK.sub(lambda link: link[1] + (site_target(source, link[2]) or link[2]) + link[3], markdown)


def notebook(path: Path) -> str:
    """The cells of a Jupyter notebook as Markdown, with a link to the file."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    # why HTML: links of Markdown to the notebook become links to this page
    parts.insert(1, f'<a href="{path.name}" download>Download the notebook</a> to run it.')
    return "\n\n".join(parts)


def site_target(page: str, link: str) -> str | None:
    """The target within the site of a link of `page`, "files/…" for a file that is copied; None to leave it alone.

    page: file name of a page of the site; all are in one folder. link: as written, relative to the page's own file.
    """
    if ":" in link or link.startswith("/"):
        return None
    folder = PurePosixPath(INCLUDED.get(page, f"docs/{page}")).parent
    path = (ROOT / folder / link).resolve()
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    for included, file in INCLUDED.items():
        if name == file:
            return included
    if name == "docs/notebook.ipynb":
        return NOTEBOOK
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"files/{name}" if path.is_file() else None
