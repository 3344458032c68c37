"""Sources -> order -> decode -> resize -> shards: every photo is decoded once, offline, for all resolutions.

`python -m prep` is the command line, `prep.prepare.build` the function behind it, `python -m prep.demo` makes
photos to try it on. Nothing here imports torch or DALI.
"""
