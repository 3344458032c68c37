"""A decoder of JPEG files for CPUs: baseline, 8 bits, one scan, 4:2:0, 4:4:4 or grey, as `region.py` describes."""
