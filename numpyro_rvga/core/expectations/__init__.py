"""E[phi(a)] for a ~ N(m, S) with its derivatives: closed forms, nodes, draws."""
