"""What parts of the data have learned, merged: once, and in rounds."""
