"""`Loader` and its parts: reader threads, and prefetching from remote storage."""

from resolute.errors import check_stack

check_stack("resolute.Loader")
