"""The integral of exp L(h) over a few parameters h, with L the bound of the other ones given h."""
