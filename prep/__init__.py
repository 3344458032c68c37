"""Offline preparation: lists photos, decodes each once, resizes it to every resolution and writes WebDataset shards.

`python -m prep` is the command line, `prep.prepare.build` the function behind it, and `python -m prep.demo` generates
photos to try it on. Nothing here imports torch or DALI.
"""
