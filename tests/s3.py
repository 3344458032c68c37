"""An S3 server on loopback, for whoever tests against an object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from urllib.request import Request, urlopen

import fsspec
import pytest

__all__ = ["running_s3", "s3_server"]

BUCKET = "bucket"


@contextmanager
def running_s3() -> Iterator[str]:
    """`s3://bucket` on a server of its own; the environment names it to s3fs, in subprocesses too."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with mock.patch.dict(os.environ, told):
        s3fs.S3FileSystem.clear_instance_cache()  # why: one made earlier talks to another server
        # why: moto keeps its buckets in this process, whichever server they came through
        urlopen(Request(f"{told['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")).close()
        try:
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"s3://{BUCKET}"
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()


@pytest.fixture
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket, `s3://bucket`."""
    with running_s3() as url:
        yield url
