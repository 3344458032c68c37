"""Offline preparation: lists photos, decodes each once, resizes it to every resolution and writes WebDataset shards.

`resolute shards` is the command line and `prep.build.build` the function behind it. Nothing imports torch or DALI.
"""
