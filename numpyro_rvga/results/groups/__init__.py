"""Posteriors of models with very many groups, whose groups stay in their parts or come in a stream."""
