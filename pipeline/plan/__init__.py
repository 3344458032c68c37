"""Which samples, crops, flips and mixes make up batch i: a pure function of recipe, seed and i. No torch, no DALI."""
