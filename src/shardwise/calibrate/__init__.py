"""From measurements to the coefficients that predictions take: the loop, closed."""
