"""Credentials are found in URLs of any spelling; names with `@` stay; keys of object stores are taken literally."""

from __future__ import annotations

import base64

import pytest

from resolute.urls import (
    bucket_and_key,
    is_misread,
    is_url,
    local_path,
    strip_credentials,
    without_credentials,
    without_user_info,
)

WITHOUT = [  # with credentials, and without: as an identity and in texts
    ("sftp://me:pw@host/d/a.jpg", "sftp://host/d/a.jpg"),
    ("sftp://me:p@s@host", "sftp://host"),
    ("sftp://me:p@@s@host:22/d", "sftp://host:22/d"),
    ("sftp://me:p/w@host/d", "sftp://host/d"),
    ("sftp://me:p?w@host/d", "sftp://host/d"),
    ("sftp://me:p#w@host", "sftp://host"),
    ("sftp://me:70000/w@host", "sftp://host"),
    ("sftp://me:p w@host/d", "sftp://host/d"),
    ("ftp://me%40x:p%2Fw@host/d", "ftp://host/d"),
    ("http://token@[::1]:80/d", "http://[::1]:80/d"),
    ("http://me:pw@[fe80::1]/d", "http://[fe80::1]/d"),
    ("HTTPS://mé:pä@host/ü", "HTTPS://host/ü"),
    ("smb://group;me:pw@host/share", "smb://host/share"),
    ("sftp://arn:pw@host/d", "sftp://host/d"),
    ("s3://arn:SECRET@bucket/x", "s3://bucket/x"),
    ("s3://KEY:SEC/RET@bucket/x", "s3://bucket/x"),
    ("hf://me:tok/en@datasets/me/x", "hf://datasets/me/x"),
    ("simplecache::sftp://me:p@s@host/x", "simplecache::sftp://host/x"),
    ("zip://a@b.jpg::https://me:p@s@host/x.zip", "zip://a@b.jpg::https://host/x.zip"),
    ("https://host/x?u=https://me:p@s@other/y", "https://host/x?u=https://other/y"),
]
NAMES = [  # without credentials
    "https://host/photo@2x.jpg",
    "http://127.0.0.1:8080/photo@2x.jpg",
    "http://[::1]:8080/photo@2x.jpg",
    "https://host?mail=a@b",
    "s3://bucket/a@b/c:d@e",
    "s3://arn:aws:s3:us-east-1:1:accesspoint/x/a@b",
    "gs://bucket/a@b",
    "hf://datasets/me/photos@main/x.tar",
    "hf://model@main/x.tar",
    "abfs://box@account.dfs.core.windows.net/a",
    "az://box@account/a",
    "file:///a:b@c/d",
    "zip://a:b@c.jpg",
    "github://org:repo@main/x",
    "/data/a@b/c",
    "photos/a:b@c.jpg",
]


@pytest.mark.parametrize(("url", "expected"), WITHOUT)
def test_user_info_is_removed_from_a_url_of_any_spelling(url: str, expected: str) -> None:
    assert strip_credentials(url) == without_credentials(url) == expected
    assert strip_credentials(f"got '{url}'") == f"got '{expected}'"
    assert strip_credentials(expected) == expected


@pytest.mark.parametrize("name", NAMES)
def test_an_at_sign_of_a_name_stays(name: str) -> None:
    for text in (name, f"{name}: not found", f"got '{name}', expected a@b", f"({name}) a@b"):
        assert strip_credentials(text) == text
    assert without_credentials(name) == name
    assert not is_misread(name)


def test_every_url_of_a_text_loses_its_user_info() -> None:
    text = "ftp://a:b@c/x,ftp://d:e/f@g 'hf://datasets/me/x@main' h@i https://j:k@l@m:1/n: o@p\nsftp://q:r"
    assert strip_credentials(text) == "ftp://c/x,ftp://g 'hf://datasets/me/x@main' h@i https://m:1/n: o@p\nsftp://q:r"


def test_a_password_that_may_go_on_behind_a_slash_is_not_shown_and_files_keep_different_names() -> None:
    a, b = "sftp://me:p@host/d/a@2x.jpg", "sftp://me:p@host/e/a@2x.jpg"
    assert strip_credentials(a) == "sftp://***/2x.jpg" == strip_credentials("sftp://***/2x.jpg")
    assert strip_credentials("sftp://me:a@b/c@host/d: gone") == "sftp://***/host/d: gone"
    assert (without_credentials(a), without_credentials(b)) == ("sftp://host/d/a@2x.jpg", "sftp://host/e/a@2x.jpg")


def test_a_url_whose_password_would_be_read_as_a_host_is_known() -> None:
    for url in ("sftp://me:p/w@host", "zip://x::https://me:p#w@host/x"):
        assert is_misread(url)
    for url in ("sftp://me:p@s@host/d", "http://host:80/a@b", "sftp://host"):
        assert not is_misread(url)


def test_keys_and_local_paths_are_literal() -> None:
    assert bucket_and_key("s3://bucket/a#b%20c?d/") == ("s3://bucket", "a#b%20c?d")
    assert bucket_and_key("s3://bucket") == ("s3://bucket", "")
    assert local_path("file:///a%20b#c") == "/a%20b#c"
    assert local_path("a://") is None
    for path in ("/a://b", "C:/photos", "a b://c"):
        assert local_path(path) == path
        assert not is_url(path)
    assert is_url("simplecache::s3://bucket/x")


def test_user_info_of_a_web_address_becomes_a_header() -> None:
    for password in ("a@b:c", "a%40b%3Ac"):
        address, login = without_user_info(f"https://me:{password}@host:80/x@y")
        assert address == "https://host:80/x@y"
        assert base64.b64decode(login.removeprefix("Basic ")) == b"me:a@b:c"
    assert without_user_info("https://host/x@y") == ("https://host/x@y", "")
