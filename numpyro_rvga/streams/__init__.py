"""Where rows come from, and how a pass takes them through an engine: pieces, checkpoints, rows that cannot be used."""
