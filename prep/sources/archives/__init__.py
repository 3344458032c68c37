"""Members of tar and zip archives, read in bounded memory, and the sizes by which an archive is recognised."""
