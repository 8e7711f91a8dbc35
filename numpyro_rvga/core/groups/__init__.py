"""Groups that are independent given shared sites: their elimination, and integrals over them."""
