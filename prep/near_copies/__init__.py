"""Near copies: photos that show the same picture, or the same moment, in other bytes."""
