"""The notebook for Colab and Kaggle, executed with tiny photos on the CPU."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import make_photos

SETTINGS = """
from pathlib import Path

CODE, PHOTOS = Path({root!r}), Path({folder!r}, "photos.zip")
SHARDS, KEPT = Path({folder!r}, "shards"), Path({folder!r}, "kept")
NEW_PHOTOS = None
MODEL, WEIGHTS = "test_resnet", ""
STAGES = [(32, 1, 16), (48, 1, 16)]
LEARNING_RATE = 0.02
"""


@pytest.fixture
def _kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Jupyter kernel that runs in this environment."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "tests", "language": "python"}))


@pytest.mark.slow
@pytest.mark.usefixtures("_kernel")
@pytest.mark.filterwarnings("default")  # why: Jupyter's packages warn of each other
def test_the_notebook_trains_predicts_and_exports_from_a_zip_of_photos(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    make_photos(tmp_path / "photos", each=10)
    shutil.make_archive(str(tmp_path / "photos"), "zip", tmp_path / "photos")
    notebook: Any = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    cells = {cell.metadata.tags[0]: cell for cell in notebook.cells if cell.cell_type == "code"}
    cells["settings"].source = SETTINGS.format(root=str(ROOT), folder=str(tmp_path))
    cells["install"].source = "import sys"
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = {tag: "".join(output.get("text", "") for output in cell.outputs) for tag, cell in cells.items()}
    assert "starting" in printed["train"]
    assert "epoch 0 train 32 px:" in printed["train"]  # the bar
    assert printed["curves"].count("top-1") == 2
    with (tmp_path / "kept" / "pred.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    assert (tmp_path / "kept" / "model" / "model.safetensors").stat().st_size > 0
    assert (tmp_path / "kept" / "runs" / "photos" / "last.pt").exists()  # a later session resumes from it
