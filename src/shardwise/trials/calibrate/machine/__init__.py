"""What this machine, or several joined by a launcher, can do: measured, not looked up."""
