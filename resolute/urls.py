"""URLs: which texts are URLs, what in them is secret, and where an object store's keys begin.

User info (`user:password@`) ends at the last `@` before the host, as for every driver. A password that was not
percent-encoded may hold `/`, `?` and `#`, and no rule finds its end for certain. So there are two rules:

`strip_credentials`     for texts that people see: removes too much rather than too little, and marks it with `***`
`without_credentials`   for names and keys of caches: removes what a driver reads as user info

A host with a port, or without one, is taken for a host: `https://host:8080/a@2x.jpg` has no user info.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

__all__ = [
    "bucket_and_key",
    "is_misread",
    "is_url",
    "local_path",
    "strip_credentials",
    "without_credentials",
    "without_user_info",
]

_LOCAL = ("file://", "local://")
_SCHEMES = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)?://")
_END_OF_URL = re.compile(r"[\s'\"<>]")
_END_OF_AUTHORITY = re.compile(r"[/?#]")
_LAST_PORT = 65535
# a host without user info, with an optional port, and the punctuation after it in a sentence
_HOST = re.compile(r"(?:\[[^\[\]]*\]|[^:@\[\]]*)(?::(\d{0,5}))?[\])}:,;.`]*")
# schemes of paths and names, in which `@` is a character of a name: hf://datasets/me/photos@main, abfs://box@account
_PATHS = frozenset({"dir", "file", "git", "github", "libarchive", "local", "tar", "zip"})
_NAMES = frozenset({"abfs", "abfss", "adl", "az", "azure", "hf", "oci", "wasb", "wasbs"})
_SECRET_QUERY = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|signature|secret|credential|password|passwd|access[_-]?key|api[_-]?key)[\w.-]*"
    r"|sig|se|sp|sv|sr|policy|expires|key-pair-id|awsaccesskeyid|googleaccessid))=(?:[^&\s'\"]*[^&\s'\":,;.])?"
)


def is_url(path: str | Path) -> bool:
    """Whether `path` begins with a scheme, as `s3://...`, or with a chain of fsspec's, as `simplecache::s3://...`."""
    scheme, mark, _ = str(path).partition("://")
    return bool(mark) and _is_scheme(scheme)


@lru_cache(1024)  # listings have millions of URLs of a few schemes
def _is_scheme(text: str) -> bool:
    return _SCHEMES.fullmatch(text) is not None


def local_path(path: str | Path) -> str | None:
    """The path of a plain path, a `file://` or a `local://` URL, taken literally; None for any other URL."""
    path = str(path)
    for scheme in _LOCAL:
        if path.startswith(scheme):
            return path.removeprefix(scheme)
    return None if is_url(path) else path


def bucket_and_key(url: str) -> tuple[str, str]:
    """`s3://bucket` and the key in it, of a URL of an object store.

    A key is any text: `#`, `?` and `%` are characters of it, and nothing is decoded.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key.rstrip("/")


def without_user_info(url: str) -> tuple[str, str]:
    """A web address without its user info, and this as a header's value: `Basic ...`, or "" if there is none."""
    scheme, _, rest = url.partition("://")
    user_info, mark, host = _up_to(_END_OF_AUTHORITY, rest).rpartition("@")
    if not mark:
        return url, ""
    user, _, password = user_info.partition(":")
    secret = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return f"{scheme}://{host}{rest[len(user_info) + len(mark) + len(host) :]}", f"Basic {secret}"


def strip_credentials(text: str) -> str:
    """Remove user names, passwords, tokens and signatures of all URLs in `text`.

    Applied to everything that is printed, logged, reported or recorded. If a URL has user info and another `@` further
    on, its password may reach that far: `sftp://me:a@b/c@host/d` becomes `sftp://***/host/d`.
    """
    return _strip(text, _shown)


def without_credentials(url: str) -> str:
    """A URL, or a chain of them, without user info and the values of secret parameters: the same for whoever reads it.

    Different files of a server keep different names.
    """
    return _strip(url, _named)


def is_misread(url: str) -> bool:
    """Whether a password in `url` is cut by a `/`, `?` or `#` in it, so that a driver takes its beginning for a host.

    A driver's message would show it.
    """
    scheme, _, rest = url.rpartition("::")[2].partition("://")
    return _is_cut(scheme, rest)


def _strip(text: str, find: Callable[[str, str], tuple[int, str]]) -> str:
    """`text` without user info and secret parameters.

    `find(scheme, rest)` gets what follows `://`, up to the next URL. It returns how many characters of it are user
    info, and what is put in their place.
    """
    if "://" in text:
        found = list(_URL.finditer(text))
        ends = [match.start() for match in found[1:]] + [len(text)]
        parts = [text[: found[0].start()]]
        for match, end in zip(found, ends, strict=True):
            rest = text[match.end() : end]
            secret, mark = find(match[1] or "", rest)
            parts += [match[0], mark, rest[secret:]]
        text = "".join(parts)
    return _SECRET_QUERY.sub(r"\1=***", text)


def _named(scheme: str, rest: str) -> tuple[int, str]:
    if _is_cut(scheme, rest):
        return rest.rfind("@") + 1, ""
    authority = _up_to(_END_OF_AUTHORITY, rest)
    return 0 if _is_name(scheme, authority) else authority.rfind("@") + 1, ""


def _shown(scheme: str, rest: str) -> tuple[int, str]:
    url = _up_to(_END_OF_URL, rest)
    authority = _up_to(_END_OF_AUTHORITY, url)
    if _is_name(scheme, authority):
        return 0, ""
    user_info = authority.rfind("@") + 1
    if not user_info and _is_host(authority):
        return 0, ""
    # why the line: without `@`, the URL ended at a blank or a quote of its password
    last = (url if "@" in url else rest.partition("\n")[0]).rfind("@") + 1
    return last, "***/" if last > user_info > 0 else ""


def _is_cut(scheme: str, rest: str) -> bool:
    authority = _up_to(_END_OF_AUTHORITY, rest)
    is_whole = "@" in authority or _is_host(authority) or _is_name(scheme, authority)
    return "@" in rest and not is_whole


def _up_to(end: re.Pattern[str], text: str) -> str:
    match = end.search(text)
    return text if match is None else text[: match.start()]


def _is_host(authority: str) -> bool:
    """Whether it is a host without user info."""
    host = _HOST.fullmatch(authority)
    return host is not None and int(host[1] or 0) <= _LAST_PORT


def _is_name(scheme: str, authority: str) -> bool:
    """Whether an `@` in it is a character of a name."""
    scheme = scheme.lower()
    if scheme in _NAMES:
        return ":" not in authority
    return scheme in _PATHS or (scheme in ("s3", "s3a") and authority.startswith("arn:aws"))
