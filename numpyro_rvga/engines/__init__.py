"""A program's updates and expectations, compiled: state and rows in, state out. Nothing here depends on where rows come
from."""
