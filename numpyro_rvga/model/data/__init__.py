"""The user's arrays, keyword arguments and rows."""
