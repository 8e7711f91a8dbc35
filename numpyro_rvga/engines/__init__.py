"""A program's updates, compiled: state and rows in, state out. Nothing here knows where rows come from."""
