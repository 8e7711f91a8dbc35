"""Traced programs (jaxprs), read: which affine functions of theta a term depends on, and the rest of it."""
