"""Fit the coefficients of predictions to measured runs."""
