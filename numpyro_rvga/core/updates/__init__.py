"""Updates of q: the solver and its loops, the recursion over blocks of rows, and BONG's rules."""
