"""One adapter per image loader, all reading the same stored images, and the processes that run them.

An adapter is a module with `stream(job)`, which yields float32 batches (batch_size, 3, res, res), cropped at random,
flipped and normalised, `job.batches` or more at each resolution; the loader starts with the first `next` and ends with
the generator. Some also have `centre_crops(job, jpegs)`, which resizes a known crop.
"""
