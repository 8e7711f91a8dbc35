"""A program's updates and expectations, compiled: state and rows in, state out. Nothing here knows where rows come
from."""
