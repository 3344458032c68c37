"""How do the loaders that people use today do beside ours, on the very same stored images?"""
