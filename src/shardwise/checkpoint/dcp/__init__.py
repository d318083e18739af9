"""Save and load through torch's distributed checkpoint, which plans who writes and reads what."""
