"""What a run leaves: the posterior, its draws and predictions, ArviZ, NUTS, files, merging; and the report on a model's
fixed points."""
