"""Credentials in URLs never appear in anything that prep prints or writes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.storage.output import OutputBucket
from resolute.urls import is_url
from tests.support.http_server import RangeHandler, serving
from tests.support.source_formats import list_source, pack_parquet, pack_samples, pack_table, pack_tar, pack_zip

Prep = Callable[..., Any]
USER, PASSWORD, SIGNATURE = "someone", "hunter2@s3cret@end0fit", "5ignature/with/slashes"
SECRETS = (*PASSWORD.split("@"), SIGNATURE, SIGNATURE.rpartition("/")[2])
QUERY = f"?X-Amz-Credential=AKIA{SECRETS[0]}&X-Amz-Signature={SIGNATURE}"


class Guarded(RangeHandler):
    """A file server that wants a password and a signature; `broken`: it answers 500."""

    broken = False

    def do_GET(self) -> None:
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.broken:
            return self.send_error(500)
        if self.headers.get("Authorization") != expected or SIGNATURE not in self.path:
            return self.send_error(403)
        with suppress(ConnectionError):  # the client closed the connection early
            super().do_GET()
        return None

    do_HEAD = do_GET


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path, Guarded) as port:
        yield f"http://{USER}:{PASSWORD}@127.0.0.1:{port}"


def check_clean(ran: Any, out: Path) -> None:
    texts = {"stdout": ran.out.encode(), "stderr": ran.err.encode()}
    texts |= {str(path): path.read_bytes() + str(path).encode() for path in out.rglob("*") if path.is_file()}
    for secret in SECRETS:
        for place, text in texts.items():
            assert secret.encode() not in text, (secret, place)


def photo_names(photos: Path) -> list[str]:
    return [path.relative_to(photos).as_posix() for path in sorted(photos.rglob("*.jpg")) if path.name[0] != "."]


def errors(ran: Any) -> list[str]:
    """The lines on stderr that do not describe the targets of a table."""
    lines = ran.err.splitlines()
    return [line for line in lines if "(TARGET=" not in line and not line.startswith("resolute shards:   line ")]


@pytest.mark.slow
def test_no_credential_of_a_source_is_printed_or_written(
    guarded: str, photos: Path, tmp_path: Path, prep: Prep
) -> None:
    names = photo_names(photos)[::3]
    data = {name: (photos / name).read_bytes() for name in names}
    pack_zip(tmp_path / "p.zip", data.items())
    pack_tar(tmp_path / "p.tar.gz", data.items(), "gz")
    samples = [(f"{i}.jpg", photo, {"cls": b"%d" % (i % 2)}) for i, photo in enumerate(data.values())]
    pack_samples(tmp_path / "x-00.tar", samples)
    pack_parquet(tmp_path / "x.parquet", [(photo, "", i % 2) for i, photo in enumerate(data.values())], None)
    rows = [(f"{guarded}/photos/{name}{QUERY}", name.partition("/")[0]) for name in [*names, "apple/gone.jpg"]]
    table = pack_table(tmp_path / "list.csv", rows)
    sources = ["p.zip", "p.tar.gz", "x-{00..00}.tar", "x.parquet"]
    for number, src in enumerate([*(f"{guarded}/{name}{QUERY}" for name in sources), str(table)]):
        out = tmp_path / f"set-{number}"
        argv = ("--src", src, "--res", "32", "--shard-samples", 20, "--max-bad", "0.5")
        ran = prep(*argv, "--out", out)
        assert ran.status == 0, ran.err
        check_clean(ran, out)
        if src == str(table):  # its links are in the table of photos; the others are in the arguments alone
            check_clean(prep(*argv, "--out", tmp_path / "dry", "--dry"), out)
        refused = prep(*argv, "--quality", 50, "--out", out)
        assert (refused.status, len(errors(refused))) == (2, 1), refused.err
        check_clean(refused, out)
    assert "photos/apple/gone.jpg" in (tmp_path / "set-4" / "rejects.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_retries")
def test_no_credential_is_printed_or_written_when_the_store_refuses_or_fails(
    guarded: str, photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"{guarded}/photos/{name}{QUERY}", name.partition("/")[0]) for name in photo_names(photos)]
    table = pack_table(tmp_path / "list.csv", rows)
    signed_by_another = f"{guarded}/p.zip?X-Amz-Signature=another{SECRETS[0]}"
    for src in (signed_by_another, f"{guarded}/gone.zip{QUERY}"):
        ran = prep("--src", src, "--out", tmp_path / "set", "--res", "32")
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        check_clean(ran, tmp_path / "set")
    monkeypatch.setattr(Guarded, "broken", True)
    ran = prep("--src", table, "--out", tmp_path / "set", "--res", "32")
    assert (ran.status, len(errors(ran))) == (2, 1), ran.err
    check_clean(ran, tmp_path / "set")


def test_the_output_url_is_shown_without_credentials() -> None:
    assert OutputBucket(f"s3://{USER}:{PASSWORD}@bucket/set").where == "s3://bucket/set"


@pytest.mark.parametrize("scheme", ["sftp", "https", "smb", "s3", "gs"])
def test_a_password_that_a_driver_would_take_for_a_host_is_refused_and_not_shown(
    scheme: str, photos: Path, tmp_path: Path, prep: Prep
) -> None:
    url = f"{scheme}://{USER}:hunter2/s3cret@host.invalid/set"
    for words in (("--src", f"{url}.zip", "--out", tmp_path / "set"), ("--src", photos, "--out", url)):
        ran = prep(*words, "--res", "32")
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert f"{scheme}://host.invalid/set" in ran.err
        assert "got a user name or password with / or ? or #" in ran.err
        check_clean(ran, tmp_path / "set")
    with pytest.raises(ResoluteError) as refused:
        ShardSet.open(url)
    assert str(refused.value).startswith(f"{scheme}://host.invalid/set: not understood, got a user name or password")


def test_a_renewed_signature_does_not_change_a_source(work: Path, tmp_path: Path) -> None:
    prints = []
    for signature in ("one", "two"):
        rows = [(f"https://{signature}@host/{i}.jpg?sig={signature}", "ab"[i % 2]) for i in range(4)]
        got = list_source(work, pack_table(tmp_path / "list.csv", rows))
        _, place = next(got.places())
        assert is_url(place.path)
        assert place.path.endswith(f"sig={signature}")
        prints.append((got.by_class(), got.name(0)))
    assert prints[0] == prints[1]
