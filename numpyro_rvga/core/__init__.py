"""Pure JAX: arrays in, arrays out. Nothing here imports NumPyro or ArviZ, reads files or has global state."""
