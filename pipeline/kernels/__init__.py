"""Augmentation on a GPU, in Triton: what DALI has resized becomes what the network sees.

The operations are those of `pixels` (Pillow's arithmetic), to the rounding of a level. `slot` runs one operation of
each image, `finish` erases, mixes and normalises, `launch` prepares a batch's numbers and launches both.
"""
