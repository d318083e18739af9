"""Every fault that training meets, planted in real runs: what happens, and what is left."""
