"""The model's own code, run under NumPyro's handlers: which sites it has, and what each of them depends on."""
