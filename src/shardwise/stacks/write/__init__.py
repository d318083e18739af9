"""Write a run as a file of another stack, with the settings that it cannot express."""
