"""Predictors of the remaining output length: one two-stage contract, several realisations."""
