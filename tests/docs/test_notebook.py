"""The notebook for Colab and Kaggle: executed with tiny photos on the CPU, and again after a disconnect."""

from __future__ import annotations

import csv
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


def execute(folder: Path) -> dict[str, str]:
    """Run all cells with tiny settings and without the installation; returns the output of each by its tag."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook: Any = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    cells = {cell.metadata.tags[0]: cell for cell in notebook.cells if cell.cell_type == "code"}
    cells["settings"].source = SETTINGS.format(root=str(ROOT), folder=str(folder))
    cells["install"].source = "import sys"
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(folder)}}).execute()
    return {tag: "".join(output.get("text", "") for output in cell.outputs) for tag, cell in cells.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # why: Jupyter's packages warn of each other
def test_the_notebook_trains_on_a_zip_of_photos_and_resumes_after_a_disconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernel / "kernel.json").write_text(f'{{"argv": {argv}, "display_name": "tests", "language": "python"}}')
    make_photos(tmp_path / "photos", each=10)
    shutil.make_archive(str(tmp_path / "photos"), "zip", tmp_path / "photos")
    first = execute(tmp_path)
    assert "starting" in first["train"]
    assert "epoch 0 train 32 px:" in first["train"]  # the bar
    assert first["curves"].count("top-1") == 2
    with (tmp_path / "kept" / "pred.csv").open() as file:
        predicted = list(csv.DictReader(file))
    assert len(predicted) == 3
    assert (tmp_path / "kept" / "model" / "model.safetensors").stat().st_size > 0
    weights = (tmp_path / "kept" / "model" / "model.safetensors").read_bytes()
    run = tmp_path / "kept" / "runs" / "photos"
    *_, before, last = sorted(run.glob("step-*.pt"))
    last.unlink()  # what a session that ended after the first epoch leaves
    (run / "last.pt").unlink()
    shutil.copyfile(before, run / "last.pt")
    second = execute(tmp_path)
    assert "resuming at batch" in second["train"]
    assert second["predict"].splitlines()[-1] == first["predict"].splitlines()[-1]
    assert len((tmp_path / "kept" / "model" / "model.safetensors").read_bytes()) == len(weights)
