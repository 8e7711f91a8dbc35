"""Pure JAX: arrays in, arrays out. Nothing here knows NumPyro, ArviZ, files or global configuration."""
