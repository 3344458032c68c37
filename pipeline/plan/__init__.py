"""The plan: samples, crops and augmentation of batch i as a pure function of recipe, seed and i. No torch, no DALI."""
