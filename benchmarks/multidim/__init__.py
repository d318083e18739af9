"""Published runs with tensor and context parallelism, predicted and compared."""
