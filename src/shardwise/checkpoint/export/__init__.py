"""Export the weights of a checkpoint for Hugging Face and PEFT."""
