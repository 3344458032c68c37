"""One photo to small JPEGs: decoded, resized and encoded, in a worker process."""
