"""What a run leaves: the posterior, its draws and predictions, ArviZ, NUTS, files, merging."""
