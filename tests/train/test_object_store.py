"""A run from shards on an object store equals the run from the same shards in a folder."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import pytest

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.drivers import file_system
from resolute.train.logs.metrics import read_log
from tests.support.damage import damage_sample
from tests.support.http_server import RangeHandler, serving
from tests.support.s3 import running_s3
from tests.train.conftest import stages, train_words

pytestmark = pytest.mark.slow
USER, PASSWORD = "someone", "hunter2@s3cret@end0fit"
RECIPE = f"""
model = {{ name = "test_resnet" }}
data = {{ on_bad_sample = "skip" }}
augment = {{ policy = "randaugment" }}
{stages((32, 1, 16), (48, 1, 16))}order = "windowed"
"""


def test_a_run_from_an_object_store_is_bit_identical_to_a_local_one(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a damaged sample that is reported and replaced in both."""
    root = Path(shutil.copytree(shard_root, tmp_path / "set"))
    damage_sample(ShardSet.open(root), 0)
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.toml").write_text(RECIPE)
    with running_s3() as url:
        remote = f"{url}/a set#1%25?"  # a key is taken as it is
        fs, folder = file_system(remote)
        for path in (path for path in root.rglob("*") if path.is_file()):
            fs.pipe_file(f"{folder}/{path.relative_to(root)}", path.read_bytes())
        for name, shards in (("here", str(root)), ("there", remote)):
            assert main(train_words(shards, tmp_path / "tiny.toml", tmp_path / name)) == 0
    here, there = (read_log(tmp_path / name / "tiny" / "run.jsonl") for name in ("here", "there"))
    for kind in ("step", "epoch"):
        losses = [r["loss"] for r in here if r["kind"] == kind]
        assert losses == [r["loss"] for r in there if r["kind"] == kind]
        assert losses
    for log in (here, there):
        (skipped,) = (r for r in log if r["kind"] == "skipped")
        assert "is damaged, got CRC-32" in skipped["reason"]
    assert any((tmp_path / "cache").rglob("*"))


class Guarded(RangeHandler):
    """A file server that wants a password."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}":
            return self.send_error(403)
        return super().do_GET()


def test_no_part_of_the_password_of_a_set_is_printed_or_written_by_a_run(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.toml").write_text(RECIPE)
    with serving(shard_root, Guarded) as port:
        url = f"http://{USER}:{PASSWORD}@127.0.0.1:{port}"
        words = train_words(url, tmp_path / "tiny.toml", tmp_path / "runs")
        named = words.index("--run")
        assert main(words[:named] + words[named + 2 :]) == 0  # the run's name is made of the URL
        assert main(train_words(f"{url}/gone", tmp_path / "tiny.toml", tmp_path / "runs")) == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"best.pt", "last.pt", "run.jsonl"} <= {path.name for path in files}
    texts = [*capfd.readouterr(), *map(str, files), *(path.read_bytes().decode("latin-1") for path in files)]
    for text in texts:
        for secret in (USER, *PASSWORD.split("@")):
            assert secret not in text
