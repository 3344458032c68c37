"""The file system of a URL: `ObstoreFS` for object stores, fsspec's driver for any other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from resolute.errors import ResoluteError, strip_credentials
from resolute.urls import bucket_and_key, is_misread

__all__ = ["OBJECT_STORES", "check_user_info", "driver", "file_system", "obstore_fs"]

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss")  # protocols that obstore reads and writes


def file_system(url: str, *, patience_s: float = 60.0) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. Raises `ResoluteError`.

    patience_s   no attempt of a failed request begins later than this; of object stores only
    """
    check_user_info(url)
    protocol, _, path = url.partition("://")
    if protocol in OBJECT_STORES:
        # why the process: obstore's stores must not cross a fork
        return obstore_fs(bucket_and_key(url)[0], patience_s, os.getpid()), path.rstrip("/")
    return driver(url)


def driver(url: str, **options: Any) -> tuple[Any, str]:
    """fsspec's driver for a URL, with `options`, and the path in it. Raises `ResoluteError`."""
    from fsspec.core import url_to_fs  # why here: slow to import, needed only for URLs

    # why no cache: listings would grow with the number of files, and other processes write there
    with _driver_errors(url):
        fs, path = url_to_fs(url, use_listings_cache=False, **options)
    return fs, str(path)


def check_user_info(url: str) -> None:
    """Raise `ResoluteError` if a driver would take a part of the password for the host, and print it."""
    if is_misread(url):
        scheme = url.partition("://")[0]
        remedy = f"leave both out, and set them for {scheme} in fsspec's configuration"  # why: few drivers decode
        if scheme in OBJECT_STORES:
            remedy = "leave both out, and set the store's own variables, such as AWS_ACCESS_KEY_ID"
        elif scheme in ("http", "https"):
            remedy = "percent-encode them (%2F, %3F, %23)"
        raise ResoluteError(
            f"{strip_credentials(url)}: not understood, got a user name or password with / or ? or #, which end the "
            f"name of a server; {remedy}"
        )


@lru_cache(maxsize=64)
def obstore_fs(root: str, patience_s: float, process: int) -> Any:
    from .obstore_fs import ObstoreFS  # why here: slow to import

    return ObstoreFS(root, patience_s=patience_s)


@contextmanager
def _driver_errors(url: str) -> Iterator[None]:
    """Turn the errors of a URL that fsspec does not know, or whose package is missing, into a `ResoluteError`."""
    protocol, root = url.partition("://")[0], strip_credentials(url)
    try:
        yield
    except ImportError as error:
        text = " ".join(str(error).split())  # names the package: "Install huggingface_hub to access HfFileSystem"
        raise ResoluteError(
            f"{root}: no driver for {protocol}://, got '{text}', expected its package; install it with pip, then run "
            "the same command again"
        ) from None
    except ValueError as error:
        raise ResoluteError(
            f"{root}: not understood, got '{error}', expected a folder or a URL such as s3://bucket/shards; correct it"
        ) from None
