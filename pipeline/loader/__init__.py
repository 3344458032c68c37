"""`Loader` and its parts: reader threads, and the download of remote tars."""

from resolute.errors import check_stack

check_stack("resolute.Loader")
