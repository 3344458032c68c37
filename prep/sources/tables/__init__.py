"""Tables and lists of photos: their forms, which columns are meant, and which photos the names mean."""
